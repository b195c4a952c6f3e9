"""MLX's attention kernels on the host, against float64: see test_host_foreign.py."""

import struct

import foreign_kernels as foreign
import mlx.core as mx
import numpy as np
import pytest
from foreign_kernels import DTYPES, check_close, random, run_mlx

from metal.host import compiler_available

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def attention(q, k, v, scale, allowed=None, bias=None, sinks=None):
    """float64 attention of (heads, queries, dim) over (KV heads, keys, dim)."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = scale * q @ k.swapaxes(-1, -2) + (0 if bias is None else bias)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return weights / total @ v


def causal(queries, keys):
    """Lower right: the last query sees the last key."""
    return np.arange(keys) <= np.arange(queries)[:, None] + keys - queries


def qkv(dtype, heads, kv_heads, queries, keys, dim):
    """As MLX arrays and in float64."""
    shapes = (heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim)
    made = [random(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    return [array for array, _ in made], [values for _, values in made]


# mask, query heads, KV heads, queries, keys, head dim
VECTOR_CASES = {
    "one_key": ("none", 4, 4, 1, 1, 64),
    "ragged": ("none", 4, 2, 1, 77, 64),
    "wide": ("none", 2, 1, 1, 40, 128),
    "causal": ("causal", 4, 2, 3, 50, 96),
    "bool_mask": ("bool", 2, 2, 2, 45, 64),
    "float_mask": ("float", 2, 1, 2, 45, 64),
    "sinks": ("sinks", 4, 2, 1, 35, 64),
}


def mask_of(kind, dtype, heads, queries, keys):
    """What the kernel takes (constants, mask, sinks) and what `attention` takes."""
    constants = {
        20: np.bool_(kind in ("bool", "float")),
        21: np.bool_(False),
        22: np.bool_(kind == "causal"),
        23: np.bool_(kind == "bool"),
        24: np.bool_(kind == "float"),
        25: np.bool_(kind == "sinks"),
    }
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


@dtypes
@pytest.mark.parametrize("case", VECTOR_CASES)
def test_sdpa_vector(dtype, case):
    kind, heads, kv_heads, queries, keys, dim = VECTOR_CASES[case]
    if dtype != "float" and case in ("one_key", "bool_mask"):
        pytest.skip("the mask does not depend on the dtype")
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
    (out,) = run_mlx(
        foreign.metal("sdpa_vector.h"),
        f"sdpa_vector<{dtype}, {dim}>",
        buffers,
        (heads, queries, 1),
        (1024, 1, 1),
        constants=constants,
    )
    check_close(out, attention(*values, dim**-0.5, **extra), dtype)


@dtypes
@pytest.mark.parametrize("keys", [33, 150])
def test_sdpa_two_pass(dtype, keys):
    heads, kv_heads, queries, dim, blocks = 4, 2, 2, 64, 32
    (q, k, v), values = qkv(dtype, heads, kv_heads, queries, keys, dim)
    source = foreign.metal("sdpa_vector.h")
    constants, _, _, extra = mask_of("causal", dtype, heads, queries, keys)
    constants[26] = np.int32(blocks)
    partial = (heads, queries, blocks)
    strides = [np.uint64(keys * dim), np.uint64(dim)]
    buffers = [
        *(q, k, v, ((*partial, dim), q.dtype), (partial, mx.float32), (partial, mx.float32), None),
        *(np.int32(keys), *strides, *strides, np.float32(dim**-0.5)),
    ]
    parts, sums, maxs = run_mlx(
        source,
        f"sdpa_vector_2pass_1<{dtype}, {dim}>",
        buffers,
        (kv_heads, 1, blocks),
        (32, heads // kv_heads, queries),
        constants=constants,
    )
    (out,) = run_mlx(
        source,
        f"sdpa_vector_2pass_2<{dtype}, {dim}>",
        [parts, sums, maxs, (q.shape, q.dtype), np.int32(blocks)],
        (heads, queries, 1),
        (1024, 1, 1),
        constants=constants,
    )
    check_close(out, attention(*values, dim**-0.5, **extra), dtype)


# causal, query heads, KV heads, queries, keys, head dim, dtype
STEEL_CASES = {
    "square": (False, 2, 1, 64, 64, 64, "float"),
    "ragged": (False, 2, 2, 45, 77, 64, "float"),
    "causal": (True, 2, 1, 70, 70, 64, "float"),
    "chunk": (True, 2, 1, 33, 90, 64, "half"),
    "short": (True, 1, 1, 5, 9, 64, "bfloat16_t"),
    "wide": (False, 2, 1, 32, 48, 128, "bfloat16_t"),
    "wide_ragged": (True, 2, 1, 41, 59, 128, "float"),
    "wide_chunk": (True, 2, 1, 20, 71, 128, "half"),
}


@pytest.mark.parametrize("case", STEEL_CASES)
def test_steel_attention(case):
    """simdgroup matrices: 8 x 8 fragments, 4 simdgroups a threadgroup."""
    is_causal, heads, kv_heads, queries, keys, dim, dtype = STEEL_CASES[case]
    rows, columns = 32, 32 if dim < 128 else 16
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
    (out,) = run_mlx(
        foreign.metal("steel/attn/kernels/steel_attention.h"),
        f"attention<{dtype}, {rows}, {columns}, {dim}, {dim}, 4, 1, bool, float>",
        [q, k, v, (q.shape, q.dtype), params],
        (blocks, heads, 1),
        (32, 4, 1),
        constants=constants,
    )
    allowed = causal(queries, keys) if is_causal else None
    check_close(out, attention(*values, dim**-0.5, allowed=allowed), dtype)
