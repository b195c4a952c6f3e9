"""Gathers the keys and values of a step's SDPA calls, and runs the calls.

MLX's SDPA computes the calls that it fuses (fused.py).  `_by_products` computes the others by MLX's
products and softmax.
"""

from collections.abc import Callable, Iterator

from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.sdpa.calls import DeviceCall, SdpaPlan, StepCalls
from vllm_metal_lite.attention.sdpa.fused import unfused
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Scores

# Bound at import: the seam replaces the public name while a forward is built.
_sdpa = mx.fast.scaled_dot_product_attention

# A function that takes rows (N, ...) and an index of any shape, and returns the rows at the index.
Take = Callable[[mx.array, mx.array], mx.array]
# A function that reads a layer's keys and values (num_kv_heads, K, head_dim) at slots (K,).
ReadKeys = Callable[[mx.array], tuple[mx.array, mx.array]]


def take_rows(rows: mx.array, index: mx.array) -> mx.array:
    return rows[index]


def execute_calls(
    plan: SdpaPlan,
    kv_group: int,
    q: mx.array,
    call: AttentionCall,
    read: ReadKeys,
    take: Take = take_rows,
) -> mx.array:
    """Attention of q (num_rows, H, D) -> (num_rows, H, Dv).

    kv_group, read: the layer's KV group, and the function that reads its keys and values.
    call.q_pe: only its last num_rows rows are used.  take: selects rows of queries and of results.
    """
    if call.q_pe is not None:
        q = mx.concatenate([q, call.q_pe[-len(q) :]], axis=-1)
    scores = call.scores
    limits = unfused(q.shape[1], q.shape[2], scores.softcap)
    planned, outputs = plan.step_calls(kv_group, call, limits), list[mx.array]()
    parts = planned.queries.cut(q if planned.q_rows is None else take(q, planned.q_rows))
    gathered = _keys_and_values(planned, read, latent=call.q_pe is not None)
    for one, queries, (k, v) in zip(planned.calls, parts, gathered, strict=True):
        if limits is None or limits.fuses(queries.shape[2], one.host.mask):
            mask = one.mask(q.dtype)
            out = _sdpa(queries, k, v, scale=scores.scale, mask=mask, sinks=scores.sinks)
        else:
            if outputs:  # MLX would else begin all calls, and keep the scores of all in memory
                (queries,) = mx.depends([queries], outputs[-1:])
            out = _by_products(queries, k, v, one, scores)
        outputs.append(out.swapaxes(1, 2).flatten(0, 1))
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return out if planned.place is None else take(out, planned.place)


def attend_whole_prompt(q: mx.array, k: mx.array, v: mx.array, scores: Scores) -> mx.array:
    """Causal attention of q (num_rows, H, D) to k and v (num_kv_heads, num_rows, head_dim)."""
    q, k, v = q.swapaxes(0, 1)[None], k[None], v[None]
    out = _sdpa(q, k, v, scale=scores.scale, mask="causal", sinks=scores.sinks)
    return out[0].swapaxes(0, 1)


def _keys_and_values(
    planned: StepCalls, read: ReadKeys, latent: bool
) -> Iterator[tuple[mx.array, mx.array]]:
    """Keys and values of each call, (B, num_kv_heads, Lk, head_dim).

    latent: keys are the latents and the rotary keys; values are the latents.
    """
    for slots, parts in planned.gathers:
        k, v = read(slots)
        if latent:
            k, v = mx.concatenate([k, v], axis=-1), k
        yield from zip(parts.cut(k, axis=1), parts.cut(v, axis=1), strict=True)


def _by_products(q: mx.array, k: mx.array, v: mx.array, one: DeviceCall, how: Scores) -> mx.array:
    """Attention that keeps its scores in memory; shapes are SDPA's.

    MLX's fallback has one product for each head, and masks all keys.  Here one product serves all
    heads that share a KV head, and the mask covers only keys that some row does not see.
    """
    b, heads, rows, dim = q.shape
    shared, softcap, sinks = (b, k.shape[1], -1), how.softcap, how.sinks
    q = (q * how.scale).reshape(*shared, dim)

    def scores_of(k: mx.array) -> mx.array:
        scores = (q @ k.swapaxes(-1, -2)).reshape(b, heads, rows, -1)
        return scores if softcap is None else softcap * mx.tanh(scores / softcap)

    def masked(scores: mx.array) -> mx.array:
        return mx.where(one.visible, scores, mx.array(-float("inf"), scores.dtype))

    scores, first = scores_of(k), one.host.num_visible
    if first == 0:
        scores = masked(scores)
    elif first < k.shape[2]:
        # Computed a second time: MLX copies an array before a write if a view of it was taken.
        scores[..., first:] = masked(scores_of(k[:, :, first:]))
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (b, heads, rows, 1))
        scores = mx.concatenate([column, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights.reshape(*shared, k.shape[2]) @ v).reshape(b, heads, rows, -1)
