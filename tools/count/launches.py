#!/usr/bin/env python3
"""Launches and bytes of a decode step on Metal, ours and mlx-lm's, without a Mac.

    METAL_LITE_DEVICE=cpu python -m tools.count.launches               the table
    METAL_LITE_DEVICE=cpu python -m tools.count.launches --only gpt-oss-20b-mxfp4 --ops
    METAL_LITE_DEVICE=cpu python -m tools.count.launches --chip m1

The graphs of whole steps of both engines are recorded, with the kernels that they have on Metal,
and replayed on MLX's Metal encoder.  A layer is what more layers add to a step.  Ours: compiled,
with every fused launch that the kernels allow, since a Mac's own timing decides which are used.
mlx-lm: as its generator runs, `generate_step` for one request and its batch caches for more.

- A launch is an operation that runs on the device; views are none.  What `mx.compile` fuses is one.
  Attention in two passes counts as one.
- Weights: bytes that threadgroup rows ask for (count/reads.py); kernels of ours ask for each weight
  once, and for each expert that is used once.  Tokens take any experts, all equally often; padding
  rows of ours take none.
- K and V: own contexts for ours, padded to the longest for mlx-lm; with one request, 700 tokens;
  with more, the lengths of load H.
- Activations: all other arrays that launches read and write.
"""

from collections import Counter
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.nn as nn
from mlx.utils import tree_map

from tests.support.recorded_steps import kernel_engine, record
from tools.bench.lib.configs import BY_NAME, PARTS, SHAPES, Part
from tools.bench.lib.loads import Sizes, many
from tools.bench.lib.models import unmade
from tools.count.mlx_lm_step import decode_graph, launched_on_metal
from tools.count.reads import CHIPS, Chip
from tools.count.replay import Experts, StepReplay
from tools.dev.run_main import parser_of
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.kernels.common import unsupported
from vllm_metal_lite.model.fit import foresee
from vllm_metal_lite.model.loader import LoadedModel, from_model
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.sampling_params import SamplingParams

KINDS = ("weights", "K and V", "activations")
BATCHES = (1, 8, 32)
_FEW = range(1, 65)
# Answers of two runs; a step is what the longer ones take more.
_TOKENS = (4, 8)
# Launches by name, and bytes by kind.
Row = tuple[Counter[str], Counter[str]]
# A period of gpt-oss and Gemma 3, as it is counted.
_KINDS_OF_LAYERS = ("sliding_attention", "full_attention")


class Cost(NamedTuple):
    """Of a layer.  besides: launches of the step that are no layer's."""

    launches: Counter[str]
    nbytes: Counter[str]
    besides: float


def depths(shape: str) -> dict[int, dict[str, Any]]:
    """Changes of a config for two numbers of layers, which differ by whole periods."""
    match SHAPES[shape]["model_type"]:
        case "gpt_oss":
            return {n: {"layer_types": [*_KINDS_OF_LAYERS] * (n // 2)} for n in (2, 4)}
        case "gemma3_text":
            return {n: {"sliding_window_pattern": 2} for n in (2, 4)}
        case "glm4_moe_lite":
            return {n: {"first_k_dense_replace": 0} for n in (1, 2)}
    return {1: {}, 2: {}}


def lengths(batch: int) -> list[int]:
    """Contexts of a step: the requests of load H, half way through their answers."""
    if batch == 1:
        return [700]
    (load,) = many(Sizes(1000, 1.0))
    return [len(p) + n // 2 for p, n in zip(load.prompts, load.max_tokens, strict=True)][:batch]


def shapes_only(shape: str, bits: str | None, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model of bfloat16 whose weights take no memory."""
    model, config = unmade(shape, bits, vocab_size=512, **changes)

    def zeros(w: mx.array) -> mx.array:
        dtype = mx.bfloat16 if mx.issubdtype(w.dtype, mx.floating) else w.dtype
        return mx.broadcast_to(mx.zeros((), dtype), w.shape)

    model.update(tree_map(zeros, model.parameters()))
    # Frequencies of rotations are made once, not in each step.
    mx.eval([v for m in model.modules() for v in m.values() if isinstance(v, mx.array)])
    return model, config


def theirs(part: Part, contexts: list[int], chip: Chip) -> Cost:
    """A layer of mlx-lm's step."""
    steps = {}
    for layers, changes in depths(part.shape).items():
        model, config = shapes_only(part.shape, part.bits, num_hidden_layers=layers, **changes)
        graph = decode_graph(model, config, contexts)
        replay = StepReplay(graph, len(contexts), _experts(config), chip)
        steps[layers] = replay.run().all_steps()
    return _layer(steps)


def _experts(config: dict[str, Any]) -> Experts | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[name] for name in names if name in config), None)
    return count and Experts(count, config["num_experts_per_tok"])


def _layer(steps: dict[int, Row]) -> Cost:
    """By steps of models of fewer and of more layers."""
    (fewer, few), (more, many_) = steps.items()
    launches, nbytes = _less(many_, few, more - fewer)
    besides = few[0].total() - fewer * launches.total()
    return Cost(launches, nbytes, besides)


def _less(more: Row, fewer: Row, by: int) -> Row:
    """The difference, divided."""
    launches, nbytes = (
        Counter({k: (a[k] - b[k]) / by for k in {*a, *b} if a[k] != b[k]})
        for a, b in zip(more, fewer, strict=True)
    )
    return launches, nbytes


# Ours


def ours(part: Part, contexts: list[int], chip: Chip) -> Cost:
    """A layer of our step, with all fused launches."""
    steps, by_gather = {}, False
    for layers, changes in depths(part.shape).items():
        weights, config = shapes_only(part.shape, part.bits, num_hidden_layers=layers, **changes)
        model = from_model(weights, None, config, part.name, fit=foresee)
        by_gather = any(unsupported(shape) for shape in model.attention_shapes)
        runs = []
        for tokens in _TOKENS:
            engine = _engine(model, len(contexts), part.options or {}, with_kernels=not by_gather)
            drive = partial(_drive, batch=len(contexts), tokens=tokens)
            with launched_on_metal():
                graph = record(engine, drive, weights=True)
            experts = _experts(config)
            replay = StepReplay(graph, len(contexts), experts, chip, compiles=not by_gather)
            runs.append(replay.run().all_steps())
        steps[layers] = _less(runs[1], runs[0], _TOKENS[1] - _TOKENS[0])
        specs = engine.model.kv_specs[-len(_KINDS_OF_LAYERS) :]
    cost = _layer(steps)
    # The reference path reads rows, writes them side by side, and reads these.
    times = 3 if by_gather else 1
    seen = sum(
        s.bytes_per_token * (times * min(n, s.window or n) + 1) for s in specs for n in contexts
    )
    cost.nbytes["K and V"] = seen / len(specs)
    return cost


def _engine(
    model: LoadedModel, batch: int, options: dict[str, Any], with_kernels: bool
) -> LLMEngine:
    config = EngineConfig(
        num_blocks=4 * batch + 8, max_num_seqs=batch, max_num_batched_tokens=16 * batch,
        max_model_len=64, **options,
    )  # fmt: skip
    make = partial(LLMEngine, config=config)
    if not with_kernels:
        return make(model)
    engine = kernel_engine(model, make, prefill="gather")
    path = engine.runner.path
    used = {
        f.name: _FEW for f in fields(path.fusion) if isinstance(getattr(path.fusion, f.name), range)
    }
    path = replace(path, fusion=replace(path.fusion, **used))
    engine.pipeline.runner = ModelRunner(engine.model.packed, path, engine.sampler)
    return engine


def _drive(engine: LLMEngine, batch: int, tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(batch):
        engine.add_request(str(i), [i] * 16, params)
    while engine.has_unfinished_requests():
        engine.step()


# Tables


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="PART")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--chip", choices=list(CHIPS), default="m4")
    parser.add_argument("--ops", action="store_true", help="list the launches")
    args = parser.parse_args(argv)
    heads = ["shape", "requests", "launches a layer", "besides", *(f"MiB: {k}" for k in KINDS)]
    print("Ours, mlx-lm.\n\n| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    for part in PARTS:
        for batch in args.batch if not args.only or part.name in args.only else ():
            contexts = lengths(batch)
            both = [count(part, contexts, CHIPS[args.chip]) for count in (ours, theirs)]
            print_row(part, batch, both, args.ops)
    return 0


def print_row(part: Part, batch: int, both: list[Cost], ops: bool) -> None:
    cells = [", ".join(f"{c.launches.total():g}" for c in both)]
    cells.append(", ".join(f"{c.besides:g}" for c in both))
    cells += [", ".join(_mib(c.nbytes[kind]) for c in both) for kind in KINDS]
    print(f"| {part.name} | {batch} | " + " | ".join(cells) + " |", flush=True)
    for cost in both if ops else ():
        print("    " + ", ".join(f"{n:g} {name}" for name, n in cost.launches.most_common()))


def _mib(nbytes: float) -> str:
    """Three digits or more."""
    mib = nbytes / 2**20
    return f"{mib:,.0f}" if mib >= 100 else f"{mib:.1f}" if mib >= 10 else f"{mib:.2f}"


if __name__ == "__main__":
    main()
