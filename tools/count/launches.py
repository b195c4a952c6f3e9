#!/usr/bin/env python3
"""Counts the launches of a decode step on Metal, without a Mac.

    METAL_LITE_DEVICE=cpu python -m tools.count.launches               the table
    METAL_LITE_DEVICE=cpu python -m tools.count.launches --only gpt-oss-20b-mxfp4 --ops

The tool records the graphs of whole steps, with the kernels that they have on Metal, and replays
them on MLX's Metal encoder.  A layer counts as the launches that further layers add to a step.
Steps are compiled, with every fused launch that the kernels allow; on a Mac, timing decides.

A launch is an operation that runs on the device; a view is no launch.  Operations that `mx.compile`
fuses count as one.  Attention in two passes counts as one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models import activations, gated_delta, gemma3_text, qwen3_next, ssm

from tests.support.recorded_steps import kernel_engine, record, stand_in
from tools.bench.lib.configs import SHAPES
from tools.bench.lib.models import unmade
from tools.bench.lib.tables import table_head
from tools.count.replay import StepReplay
from tools.dev.run_main import parser_of
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.kernels.arguments import unsupported
from vllm_metal_lite.model.fit import foresee
from vllm_metal_lite.model.loader import LoadedModel, from_model
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.sampling_params import SamplingParams

BATCHES = (1, 8, 32)
_FEW = range(1, 65)
# Tokens of the answers in two runs; their difference gives the launches of one step.
_TOKENS = (4, 8)
# A period of gpt-oss and Gemma 3, as it is counted.
_KINDS_OF_LAYERS = ("sliding_attention", "full_attention")


class Part(NamedTuple):
    """A popular shape.  bits: a weight's, None for bfloat16.  kv_bits: a value's of K and V."""

    shape: str
    bits: str | None
    kv_bits: int | None = None

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.bits or 'bf16'}"


_PARTS = (
    Part("qwen3-0.6b", "4"),
    Part("qwen3-30b-a3b", "4"),
    Part("glm-4.7-flash", "4"),
    Part("gpt-oss-20b", "mxfp4"),
    Part("gemma3-4b", "4", kv_bits=8),
    Part("qwen3-4b", "4"),
    Part("qwen3-30b-a3b", None),
    Part("glm-4.7-flash", None),
)
PARTS = {part.name: part for part in _PARTS}


class Count(NamedTuple):
    """layer: launches of a layer, by name.  besides: launches of the step outside layers."""

    layer: Counter[str]
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


def shapes_only(shape: str, bits: str | None, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model of bfloat16 whose weights take no memory."""
    model, config = unmade(shape, bits, vocab_size=512, **changes)

    def zeros(w: mx.array) -> mx.array:
        dtype = mx.bfloat16 if mx.issubdtype(w.dtype, mx.floating) else w.dtype
        return mx.broadcast_to(mx.zeros((), dtype), w.shape)

    model.update(tree_map(zeros, model.parameters()))
    # Frequencies of rotations are computed once, not in each step.
    mx.eval([v for m in model.modules() for v in m.values() if isinstance(v, mx.array)])
    return model, config


def ours(part: Part, batch: int) -> Count:
    """The launches of a decode step of `batch` requests."""
    steps: dict[int, Counter[str]] = {}
    for layers, changes in depths(part.shape).items():
        weights, config = shapes_only(part.shape, part.bits, num_hidden_layers=layers, **changes)
        model = from_model(weights, None, config, part.name, fit=foresee)
        by_gather = any(unsupported(shape) for shape in model.attention_shapes)
        runs = []
        for tokens in _TOKENS:
            engine = _engine(model, batch, part.kv_bits, with_kernels=not by_gather)
            drive = partial(_drive, batch=batch, tokens=tokens)
            with launched_on_metal():
                graph = record(engine, drive, weights=True)
            runs.append(StepReplay(graph, compiles=not by_gather).launches())
        steps[layers] = _less(runs[1], runs[0], _TOKENS[1] - _TOKENS[0])
    (fewer, few), (more, many) = steps.items()
    layer = _less(many, few, more - fewer)
    return Count(layer, few.total() - fewer * layer.total())


def _less(more: Counter[str], fewer: Counter[str], by: int) -> Counter[str]:
    """The difference, divided."""
    names = {*more, *fewer}
    return Counter({k: (more[k] - fewer[k]) / by for k in names if more[k] != fewer[k]})


@contextmanager
def compiled() -> Iterator[None]:
    """Functions that mlx-lm and MLX compile count as one launch each."""
    gates, dt, silu, gated = map(stand_in, ("compute_g", "compute_dt", "silu", "swiglu"))

    def swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
        return gated([h, gate, x], h.shape, h.dtype)

    with pytest.MonkeyPatch.context() as put:
        put.setattr(gated_delta, "compute_g", lambda _, a, b: gates([a, b], a.shape, mx.float32))
        put.setattr(ssm, "compute_dt", lambda d, b, _: dt([d, b], d.shape, mx.float32))
        put.setattr(nn, "silu", lambda x: silu([x], x.shape, x.dtype))
        put.setattr(qwen3_next, "precise_swiglu", swiglu)
        yield


@contextmanager
def launched_on_metal() -> Iterator[None]:
    """MLX's functions become the launches that they are on Metal; compiled ones become one each."""
    with pytest.MonkeyPatch.context() as put, compiled():
        clips = (gemma3_text, "clip_residual"), (nn, "gelu_approx")
        for module, name in ((activations, "swiglu_oai"), *clips):
            put.setattr(module, name, _like_the_first(name))
        put.setattr(mx, "dequantize", _dequantise)
        yield


def _like_the_first(name: str) -> Any:
    kernel = stand_in(name)

    def call(*arrays: mx.array, **options: Any) -> mx.array:
        return kernel(arrays, arrays[0].shape, arrays[0].dtype)

    return call


def _dequantise(w: mx.array, scales: mx.array, *others: Any, **how: Any) -> mx.array:
    """Of rows of an embedding."""
    kernel = stand_in("dequantize")
    shape = (*scales.shape[:-1], scales.shape[-1] * how["group_size"])
    return kernel([w, scales, *(a for a in others if a is not None)], shape, mx.bfloat16)


def _engine(model: LoadedModel, batch: int, kv_bits: int | None, with_kernels: bool) -> LLMEngine:
    sizes = {"num_blocks": 4 * batch + 8, "max_num_batched_tokens": 16 * batch}
    sizes |= {"max_num_seqs": batch, "max_model_len": 64}
    config = EngineConfig(kv_bits=kv_bits, speculate="off", **sizes)
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


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--ops", action="store_true", help="list the launches")
    args = parser.parse_args(argv)
    table_head(["shape", "requests", "launches a layer", "besides"])
    for part in [PARTS[name] for name in args.only]:
        for batch in args.batch:
            layer, besides = ours(part, batch)
            print(f"| {part.name} | {batch} | {layer.total():g} | {besides:g} |", flush=True)
            if args.ops:
                print("    " + ", ".join(f"{n:g} {name}" for name, n in layer.most_common()))
    return 0


if __name__ == "__main__":
    main()
