"""Mixtures of experts: our kernels beside mlx-lm's SwitchGLU and its weighted sum.

    python -m tools.bench.experts
    python -m tools.bench.experts --models Qwen3-30B-A3B --forms 4bit --rows 8 --plan 4 2
    python -m tools.bench.experts --dry-run        tiny shapes, kernels on the CPU host

GB/s counts the bytes of the experts that the rows use, once.  Routing is uniform at random; a step
of real rows, which agree more, uses fewer experts.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import mlx.nn as nn
import numpy as np
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwitchGLU

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.measure import seconds_per_call
from vllm_metal_lite.kernels.experts import expert_mlp, expert_sum
from vllm_metal_lite.kernels.skinny_gemm import GemmPlan
from vllm_metal_lite.kernels.weights import shape_of, spread_of
from vllm_metal_lite.model.experts import experts_of


@dataclass(frozen=True)
class Model:
    hidden: int
    experts: int
    top_k: int
    intermediate: int
    oai: bool = False


MODELS = {
    "Qwen3-30B-A3B": Model(2048, 128, 8, 768),
    "gpt-oss-20b": Model(2880, 32, 4, 2880, oai=True),
    "GLM-4.7-Flash": Model(2048, 64, 4, 1536),
    "DeepSeek-V2-Lite": Model(2048, 64, 6, 1408),
    "OLMoE": Model(2048, 64, 8, 1024),
    "Mixtral-8x7B": Model(4096, 8, 2, 14336),
}
TINY = {"tiny": Model(128, 6, 2, 64), "tiny oai": Model(64, 4, 2, 64, oai=True)}
FORMS = {
    "bf16": None,
    "4bit": {"bits": 4, "group_size": 64},
    "8bit": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}
ROWS = (1, 8, 32, 64, 512, 2048)
_CHAIN, _LAYERS = 20, 2


def layer(model: Model, form: str) -> SwitchGLU:
    how = {"activation": SwigluOAI(), "bias": True} if model.oai else {}
    # Drawn part by part: in float32 a large model's experts would not fit beside each other.
    made = SwitchGLU(32, 32, 1, **how)
    sizes = {
        "gate_proj": (model.intermediate, model.hidden),
        "up_proj": (model.intermediate, model.hidden),
        "down_proj": (model.hidden, model.intermediate),
    }
    for name, (outputs, depth) in sizes.items():
        part = made[name]
        shape = (model.experts, outputs, depth)
        part.weight = mx.random.normal(shape, mx.bfloat16, scale=depth**-0.5)
        if model.oai:
            part.bias = mx.random.normal(shape[:2], mx.bfloat16)
        if FORMS[form]:
            part = part.to_quantized(**FORMS[form])
        made[name] = part
        mx.eval(part.parameters())
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["bf16", "4bit", "mxfp4"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--plan", nargs=2, type=int, metavar=("SIMDGROUPS", "AT_ONCE"))
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    models = TINY if args.dry_run else {name: MODELS[name] for name in args.models}
    print(f"{backend.describe()}\n")
    print("| model | weights | rows | experts used | ours us | mlx-lm us | mlx-lm / ours | GB/s "
          "| difference |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with ExitStack() as stack:
        if args.dry_run:
            from metal.host import installed
            from tests.support.rounding import of_16_bits

            stack.enter_context(installed())
            stack.enter_context(patch.object(mx, "gather_mm", of_16_bits(mx.gather_mm)))
        for name, model in models.items():
            for form in args.forms:
                layers = [layer(model, form) for _ in range(_LAYERS)]
                for rows in args.rows:
                    for line in measure(layers, model, rows, args.plan, args.dry_run):
                        print(f"| {name} | {form} | {rows} | {line} |", flush=True)


def measure(
    layers: list[SwitchGLU], model: Model, rows: int, plan: list[int] | None, dry: bool
) -> Iterator[str]:
    rng = np.random.default_rng(rows)
    chosen = np.argsort(rng.random((rows, model.experts)))[:, : model.top_k].astype(np.uint32)
    indices, used = mx.array(chosen), len(np.unique(chosen))
    weights = mx.softmax(mx.random.normal((rows, model.top_k)), axis=-1).astype(mx.bfloat16)
    x = mx.random.normal((rows, model.hidden), mx.bfloat16)
    mx.eval(indices, weights, x)

    def ours(layer: SwitchGLU, x: mx.array) -> mx.array:
        experts = experts_of(layer)
        assert experts is not None
        parts = experts.gate.weight, experts.down.weight
        plans = [GemmPlan(*plan, spread_of(shape_of(part))) if plan else None for part in parts]
        return expert_sum(expert_mlp(x, indices, experts, (plans[0], plans[1])), weights)

    def theirs(layer: SwitchGLU, x: mx.array) -> mx.array:
        y = layer(x[:, None], indices[:, None])
        return (y * weights[:, None, :, None]).sum(axis=-2).squeeze(1)

    got, expected = (f(layers[0], x).astype(mx.float32) for f in (ours, theirs))
    difference = (mx.abs(got - expected).max() / mx.abs(expected).max()).item()
    link = _seconds(lambda _, x: x, layers, x, dry)
    seconds = [_seconds(f, layers, x, dry) - link for f in (ours, theirs)]
    size = sum(a.nbytes for a in _arrays(layers[0])) * used / model.experts
    yield (
        f"{used} | {1e6 * seconds[0]:.1f} | {1e6 * seconds[1]:.1f} "
        f"| {seconds[1] / seconds[0]:.2f} | {size / seconds[0] / 1e9:,.0f} | {difference:.2g}"
    )


def _arrays(layer: nn.Module) -> list[mx.array]:
    return backend.leaves(layer.parameters())


def _seconds(
    one: Callable[[SwitchGLU, mx.array], mx.array],
    layers: list[SwitchGLU],
    x: mx.array,
    dry: bool,
) -> float:
    """Seconds a layer, in chains: a number of each result is added to x, so that each waits."""

    def once(x: mx.array) -> mx.array:
        for layer in layers:
            x = x + 1e-3 * one(layer, x)[:1, :1]
        return x

    return seconds_per_call(once, x, 1 if dry else _CHAIN) / len(layers)


if __name__ == "__main__":
    main()
