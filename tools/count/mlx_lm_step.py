"""The graph of a decode step of mlx-lm, as it would be built on a Mac, and MLX's launches there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import activations, gated_delta, gemma3_text, glm4_moe_lite, qwen3_next, ssm
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from tests.support.mlx_graph import Eval, Graph
from tests.support.recorded_steps import as_on_metal, fill, stand_in
from vllm_metal_lite.backend import mx

# Heads of which MLX has attention for a decode (`has_fused_kernel`).
_FUSED_HEADS = {(d, d) for d in (64, 96, 128, 192, 256)} | {(192, 128)}


@contextmanager
def compiled() -> Iterator[None]:
    """What mlx-lm and MLX compile is one launch each."""
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
def on_metal() -> Iterator[None]:
    """mlx-lm's functions choose what they choose on Metal."""
    with pytest.MonkeyPatch.context() as put, compiled():
        as_on_metal(put)
        put.setattr(mx.metal, "is_available", lambda: True)
        put.setattr(mx, "default_device", lambda: mx.gpu)
        packed = gated_delta._make_gated_delta_packed_kernel()
        put.setattr(gated_delta, "_gated_delta_kernel_packed", packed)
        put.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())
        mx.disable_compile()  # an export knows no fused primitives
        try:
            yield
        finally:
            mx.enable_compile()


@contextmanager
def launched_on_metal() -> Iterator[None]:
    """MLX's functions are the launches that they are on Metal, and compiled ones are one each."""
    with pytest.MonkeyPatch.context() as put, compiled():
        for module, name in (
            (activations, "swiglu_oai"), (gemma3_text, "clip_residual"), (nn, "gelu_approx"),
        ):  # fmt: skip
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


def _group_expert_select(
    gates: mx.array, bias: mx.array, top_k: int, n_group: int, *_: Any
) -> tuple[mx.array, mx.array]:
    """As mlx-lm's, of one group: five launches."""
    assert n_group == 1
    scores, weights = stand_in("compiled_scores"), stand_in("compiled_weights")
    scored = scores([gates, bias], gates.shape, mx.float32)
    indices = mx.argpartition(scored, kth=top_k - 1, axis=-1)[..., :top_k]
    taken = mx.take_along_axis(scored, indices, axis=-1)
    total = taken.sum(axis=-1, keepdims=True)
    return indices, weights([taken, total], taken.shape, mx.float32)


def _attention(fused: Any) -> Any:
    """MLX's attention: one launch, or the operations that it falls back to."""

    def call(q: mx.array, k: mx.array, v: mx.array, **how: Any) -> mx.array:
        if (q.shape[-1], v.shape[-1]) in _FUSED_HEADS:
            return fused(q, k, v, **how)
        heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
        rows = (q * how["scale"]).reshape(q.shape[0], heads, repeats, *q.shape[2:])
        scores = rows @ mx.expand_dims(k, 2).swapaxes(-1, -2)
        mask = how.get("mask")
        if isinstance(mask, mx.array):
            scores = scores + mask.reshape(scores.shape)
        out = mx.softmax(scores, axis=-1, precise=True) @ mx.expand_dims(v, 2)
        return out.flatten(1, 2)

    return call


def filled_caches(model: nn.Module, contexts: list[int]) -> list[Any]:
    """Caches of a decode that is under way: those of `generate_step`, or of `BatchGenerator`."""
    longest, caches = max(contexts), make_prompt_cache(model)
    padding = [longest - n for n in contexts]
    if len(contexts) == 1:
        for cache in caches:
            cache.offset = longest - 1
        return caches
    batched: list[Any] = []
    for cache in caches:
        if isinstance(cache, RotatingKVCache):
            batched.append(BatchRotatingKVCache(cache.max_size, padding))
            batched[-1]._offset = longest - 1
        else:
            assert isinstance(cache, KVCache)
            batched.append(BatchKVCache(padding))
        batched[-1].offset = batched[-1].offset + (longest - 1)
        mx.eval(batched[-1].offset)
    return batched


def decode_graph(model: nn.Module, config: dict[str, Any], contexts: list[int]) -> Graph:
    """One decode of requests with these contexts.  The model is of no use afterwards."""
    batch, longest = len(contexts), max(contexts)
    specs = _kv_shapes(config)
    caches = filled_caches(model, contexts)
    stores: list[mx.array] = []
    for cache in caches:
        length = -(-longest // 256) * 256
        if isinstance(cache, RotatingKVCache | BatchRotatingKVCache):
            length = min(length, cache.max_size)
        stores += [mx.zeros((batch, heads, length, dim), mx.bfloat16) for heads, dim in specs]
        cache._idx = (longest - 1) % length
    parameters = tree_flatten(model.parameters())

    def run(tokens: mx.array, *arrays: mx.array) -> list[mx.array]:
        kv, given = arrays[: len(stores)], arrays[len(stores) :]
        model.update(tree_unflatten([(p, a) for (p, _), a in zip(parameters, given, strict=True)]))
        for i, cache in enumerate(caches):
            cache.keys, cache.values = kv[2 * i : 2 * i + 2]
        logits = model(tokens, cache=caches)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        kept = [a for c in caches for a in (c.keys, c.values)]
        kept += [c.offset for c in caches if isinstance(c.offset, mx.array)]
        return [mx.argmax(logprobs, axis=-1), *kept]

    events: list[dict[str, Any]] = []
    with on_metal(), launched_on_metal(), pytest.MonkeyPatch.context() as put:
        put.setattr(mx.fast, "scaled_dot_product_attention",
                    _attention(mx.fast.scaled_dot_product_attention))  # fmt: skip
        put.setattr(glm4_moe_lite, "group_expert_select", _group_expert_select)
        tokens = mx.zeros((batch, 1), mx.int32)
        mx.export_function(events.append, run, tokens, *stores, *(a for _, a in parameters))
    graph = Graph()
    fill(graph, events)
    names = [n for n, *_ in next(e["inputs"] for e in events if e["type"] == "inputs")]
    given = [
        "tokens",
        *(f"kv {i}" for i in range(len(stores))),
        *(f"weight {p}" for p, _ in parameters),
    ]
    graph.arguments = dict(zip(given, names, strict=True))
    outputs = next(e["outputs"] for e in events if e["type"] == "outputs")
    graph.evals.append(Eval("decode", [n for n, *_ in outputs]))
    return graph


def _kv_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(heads, head size) of K and of V as mlx-lm keeps them."""
    if "kv_lora_rank" in config:
        return [(1, config["kv_lora_rank"]), (1, config["qk_rope_head_dim"])]
    return [(config["num_key_value_heads"], config["head_dim"])] * 2
