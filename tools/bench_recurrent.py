"""Measure the kernels of recurrent layers on this GPU, beside MLX's and mlx-lm's operations.

    METAL_LITE_DEVICE=gpu python tools/bench_recurrent.py [--tests] [--short] [--deadline 900]
    python tools/bench_recurrent.py --tiny     small shapes, to try the tool on a CPU

--tests: first run the kernels' tests and checks on the GPU.  --short: no convolutions alone, no
batches of 8.  Prints Markdown.  Each call of a chain takes other slots, so that states come from
memory, not from a cache.
"""

import argparse
import faulthandler
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import mlx.nn as nn
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops
from mlx_lm.models.ssm import ssm_attn
from run_main import run_main

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import measure
from vllm_metal_lite.checks.common import COMMON
from vllm_metal_lite.checks.plan import checks_for
from vllm_metal_lite.checks.run import run
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.gated_delta import fused_gated_delta, gated_delta
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.recurrence import Norm, delta_gates, given, time_gates
from vllm_metal_lite.kernels.segments import plan_segments
from vllm_metal_lite.kernels.ssm import fused_ssm_update, ssm_update

Launch = Callable[[mx.array], mx.array]  # of a token, to the next one

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("causal_conv", "gated_delta", "ssm", "fused_recurrence", "gated_rms_norm")
POOL = 512 << 20  # bytes of states that a chain goes through: more than any cache has


class Layer(NamedTuple):
    """The recurrent layer of a model; columns and kernel_size: of its convolution."""

    model: str
    kind: str  # scalar or vector gates of the delta rule, ssm, or conv: nothing but a convolution
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    columns: int
    kernel_size: int = 4


LAYERS = (
    Layer("Qwen3.5-4B", "scalar", 16, 32, 128, 128, 8192),
    Layer("Kimi Linear", "vector", 32, 32, 128, 128, 4096),
    Layer("Nemotron-H, 64 heads", "ssm", 8, 64, 128, 64, 6144),
    Layer("Nemotron-H, 112 heads", "ssm", 8, 112, 128, 64, 9216),
    Layer("LFM2-1.2B", "conv", 1, 2, 16, 8, 2048, 3),
)
TINY = tuple(
    Layer(f"tiny {kind}", kind, 1, 2, 16, 8, 32) for kind in ("scalar", "vector", "ssm", "conv")
)


def draw(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, dtype, scale=shape[-1] ** -0.5)


class Step:
    """Segments of some lengths, and the inputs of a layer for them.

    pool: bytes of states; each launch takes the next ones of as many sets of slots as fit.
    """

    def __init__(self, layer: Layer, lengths: list[int], pool: int) -> None:
        self.layer, self.rows, self.max_seqlen = layer, sum(lengths), max(lengths)
        rows, heads, count = self.rows, layer.v_heads, len(lengths)
        state = 4 * heads * layer.v_dim * layer.k_dim
        self.bytes = 2 * count * state  # of a launch: in and out
        self.sets = max(1, min(100, pool // (count * state)))
        slots = np.random.default_rng(0).permutation(self.sets * count).reshape(self.sets, count)
        cu_seqlens = np.cumsum([0, *lengths])
        plans = [plan_segments(cu_seqlens, s, s, rows, slots.size) for s in slots]
        self.segments = [mx.array(plan) for plan in plans]
        self.tiles = mx.array(plan_conv_tiles(plans[0]))
        self.q, self.k = (draw(rows, layer.k_heads, layer.k_dim) for _ in range(2))
        self.v, self.logits = draw(rows, heads, layer.v_dim), draw(rows, heads)
        wide = layer.kind == "vector"
        gates = (rows, heads, layer.k_dim) if wide else (rows, heads)
        self.gates = mx.random.uniform(0.5, 1, gates)
        self.beta = mx.random.uniform(0, 1, (rows, heads))
        self.states = mx.zeros((slots.size, heads, layer.v_dim, layer.k_dim))
        self.x = draw(rows, layer.columns)
        self.carried = draw(slots.size, layer.kernel_size - 1, layer.columns)
        self.weight, self.bias = draw(layer.columns, layer.kernel_size), draw(layer.columns)
        self.a, self.ones = -mx.random.uniform(0.1, 1, (heads,)), mx.ones(layer.v_dim, mx.bfloat16)
        mx.eval([a for a in vars(self).values() if isinstance(a, mx.array)], self.segments)

    def recurrence(self, max_seqlen: int, fused: bool = False) -> Launch:
        """fused: gates and norms of keys and queries in the kernel, not given."""
        flat = [Columns(a.reshape(self.rows, -1), 0) for a in (self.q, self.k, self.v)]
        heads, segments = self.layer.k_heads, itertools.cycle(self.segments)
        logits = Columns(self.logits, 0)

        def launch(token: mx.array) -> mx.array:
            rest = self.states, next(segments), token
            if self.layer.kind == "ssm":
                how = {"num_groups": heads, "max_seqlen": max_seqlen}
                if fused:
                    gates = time_gates(logits, self.a, self.a, (0.0, 1e9))
                    return fused_ssm_update(*flat[::-1], gates, self.a, *rest, **how)[1]
                return ssm_update(*flat[::-1], self.beta, self.a, self.a, *rest, **how)[1]
            how = {"num_k_heads": heads, "max_seqlen": max_seqlen}
            if not fused:
                return gated_delta(*flat, self.gates, self.beta, *rest, **how)[1]
            gates = delta_gates(logits, logits, self.a, self.a)
            if self.layer.kind == "vector":
                v_heads, k_dim = self.layer.v_heads, self.layer.k_dim
                gates = given(self.gates, self.beta, self.rows, v_heads, k_dim)
            norm = Norm(1e-6, self.layer.k_dim**-0.5)
            return fused_gated_delta(*flat, gates, *rest, norm=norm, **how)[1]

        return launch

    def convolution(self) -> Launch:
        segments = itertools.cycle(self.segments)
        return lambda token: causal_conv(
            Columns(self.x, 0), self.weight, self.bias, self.carried, next(segments), self.tiles,
            token, silu=True,
        )[1]  # fmt: skip

    def norm(self) -> Launch:
        """Chained by its result."""
        z = Columns(self.v.reshape(self.rows, -1), 0)
        mx.eval(z.array)  # a compiled function may capture only what is there
        return lambda x: gated_rms_norm(x, z, self.ones, 1e-5, dim=self.layer.v_dim)


def decodes(layers: tuple[Layer, ...], batches: tuple[int, ...], pool: int) -> None:
    """A row a request: the states in and out are the cost."""
    copy = measure.copy_bandwidth(min(1 << 30, pool))
    print(f"\n## Decodes, bfloat16, float32 states; a copy moves {copy / 1e9:,.0f} GB/s\n")
    print(
        "| layer | requests | recurrence us | of a copy | fused us | of a copy | convolution us "
        "| gated norm us | mlx-lm's recurrence us | MLX's us |"
    )
    print("|" + " --- |" * 10)
    for layer, batch in itertools.product(layers, batches):
        step = Step(layer, [1] * batch, pool)
        shown = []
        for fused in (False, True):
            if layer.kind == "conv":
                shown += ["-", "-"]
                continue
            ours = measure.seconds_per_call(step.recurrence(1, fused), new_token())
            shown += [f"{1e6 * ours:.1f}", f"{100 * step.bytes / ours / copy:.0f} %"]
        conv = measure.seconds_per_call(step.convolution(), new_token())
        norm = measure.seconds_per_call(step.norm(), step.v)
        shown += [f"{1e6 * conv:.1f}", "-" if layer.kind == "conv" else f"{1e6 * norm:.1f}"]
        for theirs in (_mlx_lm, _mlx):
            if layer.kind == "conv" or (theirs is _mlx and layer.kind != "scalar"):
                shown.append("-")
                continue
            states = step.states[:batch]
            shown.append(f"{1e6 * measure.seconds_per_call(theirs(step), states, chain=5):.1f}")
        print(f"| {layer.model} | {batch} | {' | '.join(shown)} |", flush=True)


def prompts(layers: tuple[Layer, ...], steps: dict[str, list[int]], pool: int) -> None:
    """Long segments: by tiles of rows, and as the text of decodes does."""
    print("\n## Prompts, bfloat16, us; mlx-lm's and MLX's as one batch, where lengths are equal\n")
    print(
        "| layer | segments | tiles | tiles, fused | rows alone | MLX's or mlx-lm's "
        "| convolution | MLX's | gated norm |"
    )
    print("|" + " --- |" * 9)
    for layer, (name, lengths) in itertools.product(layers, steps.items()):
        step = Step(layer, lengths, pool)
        ours = layer.kind != "conv"
        even = len({*lengths}) == 1
        times = [
            measure.seconds_per_call(launch, new_token(), chain=2) if ours else None
            for launch in (
                step.recurrence(step.max_seqlen), step.recurrence(step.max_seqlen, True),
                step.recurrence(1),
            )
        ]  # fmt: skip
        states = step.states[: len(lengths)]
        best = _mlx if layer.kind == "scalar" else _mlx_lm
        # A loop over thousands of rows takes minutes to compile.
        loops = layer.kind == "vector" and not mx.metal.is_available() and step.max_seqlen > 1000
        theirs = ours and even and not loops
        times.append(measure.seconds_per_call(best(step), states, chain=1) if theirs else None)
        times.append(measure.seconds_per_call(step.convolution(), new_token(), chain=2))
        times.append(measure.seconds_per_call(_mlx_conv(step), step.x[None], chain=2))
        times.append(measure.seconds_per_call(step.norm(), step.v, chain=2) if ours else None)
        shown = " | ".join("-" if t is None else f"{1e6 * t:,.0f}" for t in times)
        print(f"| {layer.model} | {name} | {shown} |", flush=True)


def _batch(step: Step) -> list[mx.array]:
    """The inputs as batches of one length."""
    shape = (step.rows // step.max_seqlen, step.max_seqlen)
    arrays = (step.q, step.k, step.v, step.gates, step.beta)
    return [a.reshape(*shape, *a.shape[1:]) for a in arrays]


def _mlx_lm(step: Step) -> Launch:
    """mlx-lm's functions, states to states: a loop over rows, or on Metal its kernel."""
    q, k, v, gates, beta = _batch(step)
    if step.layer.kind == "ssm":
        return lambda states: ssm_attn(
            v, mx.log(-step.a), k, q, step.a, beta, step.a, states, step=256
        )[1]
    update = gated_delta_kernel if mx.metal.is_available() else gated_delta_ops
    return lambda states: update(q, k, v, gates, beta, states)[1]


def _mlx(step: Step) -> Launch:
    """MLX's own operation; it takes scalar gates only."""
    q, k, v, gates, beta = _batch(step)
    beta = beta.astype(q.dtype)
    return lambda states: mx.fast.gated_delta_update(q, k, v, gates, beta, states)[1]


def _mlx_conv(step: Step) -> Launch:
    columns, size = step.layer.columns, step.layer.kernel_size
    layer = nn.Conv1d(columns, columns, size, padding=size - 1, groups=columns)
    layer.weight, layer.bias = step.weight[:, :, None], step.bias
    return lambda x: nn.silu(layer(x)[:, : x.shape[1]])


def test(seconds: float) -> None:
    """The kernels' tests and the checks of a first start, on this device."""
    files = [str(ROOT / "tests" / "kernels" / f"test_{name}.py") for name in TESTS]
    where = {
        **os.environ,
        "METAL_LITE_DEVICE": os.environ.get("METAL_LITE_DEVICE", "gpu"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *files],
        cwd=ROOT, env=where, check=False, timeout=seconds,
    )  # fmt: skip
    print(f"\ntests: exit code {done.returncode}\n", flush=True)
    for use in COMMON.values():
        for check in checks_for(use) if use.recurrences else ():
            print(run(check), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--tests", action="store_true", help="also the tests of the kernels")
    parser.add_argument("--short", action="store_true", help="the main layers and batches alone")
    parser.add_argument("--deadline", type=float, default=900, help="seconds until all is given up")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    host = nullcontext()
    if backend.is_cpu():
        from metal.host import installed

        host = installed(writable_inputs=["states"])
    print(backend.describe(), flush=True)
    if args.tests:
        test(args.deadline / 2)
    with host:
        if args.tiny:
            decodes(TINY, (1, 3), 1 << 14)
            prompts(TINY, {"1 x 20": [20], "mixed": [9, 1, 1]}, 1 << 14)
            return 0
        layers = tuple(a for a in LAYERS if a.kind != "conv") if args.short else LAYERS
        decodes(layers, (1, 64) if args.short else (1, 8, 64), POOL)
        mixed = {
            "8 x 512": [512] * 8,
            "1 x 4096": [4096],
            "512, 300, 30 x 1": [512, 300] + 30 * [1],
        }
        prompts(layers, mixed, POOL)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    run_main(main)
