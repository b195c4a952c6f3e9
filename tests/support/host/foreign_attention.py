"""MLX's attention kernels: how they are called, and attention in float64."""

import struct

import mlx.core as mx
import numpy as np

from tests.support.host import foreign_kernels as foreign
from tests.support.host.foreign_runs import Dispatch, random

SDPA_VECTOR = foreign.metal("sdpa_vector.h")


def attention(q, k, v, scale, allowed=None, bias=None, sinks=None):
    """float64 attention of (heads, queries, dim) over (KV heads, keys, dim)."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = scale * q @ k.swapaxes(-1, -2) + (0 if bias is None else bias)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    sinks = np.full((len(q), 1, 1), -np.inf) if sinks is None else sinks[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True), sinks)
    weights = np.exp(scores - top)
    return weights / (weights.sum(-1, keepdims=True) + np.exp(sinks - top)) @ v


def causal(queries, keys):
    """Lower right: the last query sees the last key."""
    return np.arange(keys) <= np.arange(queries)[:, None] + keys - queries


def qkv(dtype, heads, kv_heads, queries, keys, dim):
    """As MLX arrays and in float64."""
    shapes = (heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim)
    made = [random(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    return [array for array, _ in made], [values for _, values in made]


def mask_of(kind, dtype, heads, queries, keys):
    """What the kernel takes (constants, mask, sinks) and what `attention` takes."""
    kinds = "causal", "bool", "float", "sinks"
    flags = kind in ("bool", "float"), False, *(kind == k for k in kinds)
    constants = dict(enumerate(map(np.bool_, flags), 20))
    if kind == "causal":
        return constants, None, None, {"allowed": causal(queries, keys)}
    if kind == "bool":
        allowed = np.random.default_rng(3).random((heads, queries, keys)) < 0.7
        return constants, allowed, None, {"allowed": allowed}
    if kind == "float":
        bias, bias64 = random((heads, queries, keys), dtype, 4)
        return constants, bias, None, {"bias": bias64}
    if kind == "sinks":
        sinks, sinks64 = random((heads,), dtype, 5)
        return constants, None, sinks, {"sinks": sinks64}
    return constants, None, None, {}


def sdpa_vector(dtype, kind, heads, kv_heads, queries, keys, dim):
    """The kernel for few queries: 32 simdgroups share the keys.  Also what it has to give."""
    (q, k, v), values = qkv(dtype, heads, kv_heads, queries, keys, dim)
    constants, mask, sinks, extra = mask_of(kind, dtype, heads, queries, keys)
    strides = [np.uint64(keys * dim), np.uint64(dim)]
    buffers = [
        *(q, k, v, (q.shape, q.dtype)),
        *(np.int32(heads // kv_heads), np.int32(keys), *strides, *strides, np.float32(dim**-0.5)),
        *(mask if kind == "bool" else None, mask if kind == "float" else None),
        *(np.int32(1), np.int32(keys), np.int32(queries * keys)),
        *(sinks, np.int32(heads)),
    ]
    call = SDPA_VECTOR, f"sdpa_vector<{dtype}, {dim}>", buffers
    dispatch = Dispatch(*call, (heads, queries, 1), (1024, 1, 1), constants)
    return dispatch, attention(*values, dim**-0.5, **extra)


BLOCKS = 32  # of keys, in the first of two passes


def two_pass_first(dtype, heads, kv_heads, queries, keys, dim):
    """Causal attention over each of BLOCKS blocks of keys.  Also what both passes have to give."""
    (q, k, v), values = qkv(dtype, heads, kv_heads, queries, keys, dim)
    constants, _, _, extra = mask_of("causal", dtype, heads, queries, keys)
    partial = (heads, queries, BLOCKS)
    strides = [np.uint64(keys * dim), np.uint64(dim)]
    buffers = [
        *(q, k, v, ((*partial, dim), q.dtype), (partial, mx.float32), (partial, mx.float32), None),
        *(np.int32(keys), *strides, *strides, np.float32(dim**-0.5)),
    ]
    call = SDPA_VECTOR, f"sdpa_vector_2pass_1<{dtype}, {dim}>", buffers
    where = (kv_heads, 1, BLOCKS), (32, heads // kv_heads, queries)
    dispatch = Dispatch(*call, *where, {**constants, 26: np.int32(BLOCKS)})
    return dispatch, attention(*values, dim**-0.5, **extra)


def two_pass_second(dtype, partials, sums, maxs):
    """Joins what the first pass gives: (heads, queries, BLOCKS, dim) and twice without dim."""
    heads, queries, _, dim = partials.shape
    buffers = [partials, sums, maxs, ((heads, queries, dim), partials.dtype), np.int32(BLOCKS)]
    call = SDPA_VECTOR, f"sdpa_vector_2pass_2<{dtype}, {dim}>", buffers
    return Dispatch(*call, (heads, queries, 1), (1024, 1, 1))


def steel_attention(dtype, is_causal, heads, kv_heads, queries, keys, dim, *, columns=0, halves=1):
    """simdgroup matrices; 4 simdgroups along 32 queries.  Also what it has to give.

    `columns`: keys of a tile, by default as MLX chooses.  `halves`: simdgroups along the head dim.
    """
    rows, columns = 32, columns or (32 if dim < 128 else 16)
    (q, k, v), values = qkv(dtype, heads, kv_heads, queries, keys, dim)
    blocks, key_blocks = -(-queries // rows), -(-keys // columns)
    params = struct.pack(
        "<6if7i12q",
        *(1, heads, dim, queries, keys, heads // kv_heads, dim**-0.5),
        *(blocks, key_blocks, queries // rows, keys // columns),
        *(queries % rows, keys % columns, keys - queries),
        *(heads * queries * dim, queries * dim, dim),
        *(kv_heads * keys * dim, keys * dim, dim) * 2,
        *(heads * queries * dim, queries * dim, dim),
    )
    constants = {
        200: np.bool_(queries % rows == 0),
        201: np.bool_(keys % columns == 0),
        300: np.bool_(False),
        301: np.bool_(is_causal),
        302: np.bool_(False),
        303: np.bool_(False),
    }
    dispatch = Dispatch(
        foreign.metal("steel/attn/kernels/steel_attention.h"),
        f"attention<{dtype}, {rows}, {columns}, {dim}, {dim}, 4, {halves}, bool, float>",
        [q, k, v, (q.shape, q.dtype), params],
        (blocks, heads, 1),
        (32, 4 * halves, 1),
        constants,
    )
    allowed = causal(queries, keys) if is_causal else None
    return dispatch, attention(*values, dim**-0.5, allowed=allowed)
