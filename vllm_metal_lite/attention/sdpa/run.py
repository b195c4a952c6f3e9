"""Runs a step's SDPA calls on the keys and values gathered for each call.

MLX's own SDPA computes the calls that it fuses.  `_by_products` computes the others by MLX's
products and softmax.
"""

from collections.abc import Callable, Iterable

from vllm_metal_lite import backend
from vllm_metal_lite.attention.sdpa.calls import DeviceGroup, SdpaCalls, Unfused
from vllm_metal_lite.attention.sdpa.plan import NEVER
from vllm_metal_lite.backend import mx

# Bound at import: the seam replaces the public name while a forward is built.
_sdpa = mx.fast.scaled_dot_product_attention

# Head dimensions that MLX fuses for prompts: these on Metal, all up to 128 on CUDA.
_FUSED_DIMS, _MOST_FUSED_DIM = (64, 72, 80, 96, 128), 128
# MLX fuses heads of 256 as well: calls of few rows, and, by neural accelerators, those of many.
_LARGE_DIM, _FEW_ROWS, _MANY_ROWS = 256, 8, 1024

# Rows (N, ...) and an index of any shape -> those rows.
Take = Callable[[mx.array, mx.array], mx.array]


def take_rows(rows: mx.array, index: mx.array) -> mx.array:
    return rows[index]


def unfused(heads: int, dim: int, softcap: float | None) -> Unfused | None:
    """None if MLX fuses the calls of a layer with so many query heads of `dim`.

    Source: `has_fused_kernel` and `use_fallback` in MLX's scaled_dot_product_attention.cpp, for
    values as wide as keys, in 16 bits.
    """
    if softcap is not None or backend.is_cpu():
        return Unfused(heads)
    if dim in _FUSED_DIMS or (dim <= _MOST_FUSED_DIM and backend.name() == "cuda"):
        return None
    if dim == _LARGE_DIM:
        return Unfused(heads, _FEW_ROWS, _MANY_ROWS if backend.has_neural_accelerators() else NEVER)
    return Unfused(heads)


def run_calls(
    calls: SdpaCalls,
    q: mx.array,
    gathered: Iterable[tuple[mx.array, mx.array]],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    take: Take = take_rows,
) -> mx.array:
    """Attention of q (num_rows, H, D) -> (num_rows, H, Dv).

    gathered: keys and values of each call, (B, num_kv_heads, Lk, head_dim).  take: selects rows
    of queries and of results.
    """
    outputs = []
    parts = calls.queries.cut(q if calls.q_rows is None else take(q, calls.q_rows))
    limits = unfused(q.shape[1], q.shape[2], softcap)
    for group, queries, (k, v) in zip(calls.groups, parts, gathered, strict=True):
        if limits is None or limits.fuses(queries.shape[2], group.kind):
            out = _sdpa(queries, k, v, scale=scale, mask=group.mask(q.dtype), sinks=sinks)
        else:
            out = _by_products(queries, k, v, group, scale, softcap, sinks)
        outputs.append(out.swapaxes(1, 2).flatten(0, 1))
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return out if calls.place is None else take(out, calls.place)


def _by_products(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    group: DeviceGroup,
    scale: float,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention that keeps its scores in memory; shapes are SDPA's.

    Unlike in MLX's fallback, one product serves all heads that share a KV head, and only the keys
    that some row does not see are masked.
    """
    b, heads, rows, dim = q.shape
    shared = b, k.shape[1], -1
    q = (q * scale).reshape(*shared, dim)

    def scores_of(k: mx.array) -> mx.array:
        scores = (q @ k.swapaxes(-1, -2)).reshape(b, heads, rows, -1)
        return scores if softcap is None else softcap * mx.tanh(scores / softcap)

    def masked(scores: mx.array) -> mx.array:
        return mx.where(group.visible, scores, mx.array(-float("inf"), scores.dtype))

    scores, first = scores_of(k), group.num_visible
    if first == 0:
        scores = masked(scores)
    elif first < k.shape[2]:
        # Computed again: had a view been taken of the scores, MLX would copy them all to write.
        scores[..., first:] = masked(scores_of(k[:, :, first:]))
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (b, heads, rows, 1))
        scores = mx.concatenate([column, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights.reshape(*shared, k.shape[2]) @ v).reshape(b, heads, rows, -1)
