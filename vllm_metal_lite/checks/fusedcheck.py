"""Checks the kernels that replace MLX operations on this device.

Models rotate and normalise in many ways; two very different cases stand for all.  One: few rows
from a joined projection, normalised, all pairs (i, i + dims / 2) rotated by a base.  Two: many rows
from three arrays, some pairs (2i, 2i + 1) rotated by given frequencies, up to position 1,000,000.
"fused_decode" is `paged_decode` with the same operations on the newest tokens.
`skinny_gemm` is checked with the plans that `gemm_plan` gives for small and for large weights.
The reference is float64 on this machine's CPU, rounded where MLX's own norm and rotation round.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.result import TOLERANCE, CheckResult, largest_error, run_checks
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.cache_ops import kv_gather
from vllm_metal_lite.kernels.common import MAX_PREFILL_DIM, head_size_problem, new_token
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.new_rows import Columns, HeadNorm, NewRows, Rope
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.shared_prefix import shared_prefix
from vllm_metal_lite.kernels.skinny_gemm import RowNorm, gemm_plan, skinny_gemm
from vllm_metal_lite.specs import AttentionShape

_EPS = 1e-5
# Small: an angle is a float32 product, whose error grows with the position.
_SMALL_POSITIONS = np.array((0, 1, 2, 17, 100))
_LARGE_POSITIONS = np.linspace(0, 1_000_000, 301).astype(np.int64)
# Contexts of decodes, with one row of padding.
_CONTEXTS, _BLOCK = np.array((1, 16, 0, 33, 130)), 16
# (rows, depth) of products: a depth too small for all simdgroups and one of many iterations; the
# most rows exceed the sums that threadgroup memory holds at once.
_PRODUCTS, _OUTPUTS = ((1, 1056), (3, 96), (28, 1056), (64, 1056)), 100


def check(shape: AttentionShape) -> list[CheckResult]:
    """Run the checks for the heads and the type of one attention shape."""
    heads = heads_only(shape)
    checks = {
        "rope_write": _rope_write,
        "add_rms_norm": _add_rms_norm,
        "gather_rows": _gather_rows,
        "fused_decode": _fused_decode,
    }
    if shape.dtype != mx.float32:
        checks["skinny_gemm"] = _skinny_gemm
    return run_checks({name: partial(run, heads) for name, run in checks.items()}, heads, 0)


def heads_only(shape: AttentionShape) -> AttentionShape:
    """The parts of a shape that matter here: not masks, nor the format of the store."""
    return AttentionShape(
        shape.num_heads, shape.num_kv_heads, shape.k_head_dim, shape.v_head_dim, shape.dtype
    )


def full_list() -> list[AttentionShape]:
    """The shapes that `doctor` checks."""
    cases = []
    for dtype in TOLERANCE:
        cases += [AttentionShape(*h, 64, 64, dtype) for h in ((4, 4), (5, 1), (16, 8), (71, 1))]
        cases += [
            AttentionShape(4, 2, *d, dtype)
            for d in ((32, 32), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512))
        ]
    return cases


def _add_rms_norm(shape: AttentionShape) -> tuple[float, float]:
    """Rows whose length is a multiple of four, and rows of 1,001 elements."""
    error = 0.0
    for dim in (shape.num_heads * shape.k_head_dim, 1001):
        x, y = (_draw(seed, (5, dim), shape.dtype) for seed in range(2))
        weight = _draw(2, (dim,), shape.dtype)
        added = _rounded(x + y, shape.dtype)
        normed = _rms_norm(added, weight, shape.dtype)
        a, b, gain = (mx.array(array).astype(shape.dtype) for array in (x, y, weight))
        got = add_rms_norm(a, b, gain, _EPS)
        error = max(error, _largest(got, (added, normed)))
    return error, TOLERANCE[shape.dtype]


def _gather_rows(shape: AttentionShape) -> tuple[float, float]:
    """Queries in random order, some of them more than once."""
    q = _draw(0, (50, shape.num_heads, shape.k_head_dim), shape.dtype)
    index = np.random.default_rng(0).integers(0, 50, (3, 31)).astype(np.int32)
    got = gather_rows(mx.array(q).astype(shape.dtype), mx.array(index))
    return largest_error(got, q[index]), 0.0


def _skinny_gemm(shape: AttentionShape) -> tuple[float, float]:
    """Rows and outputs that do not fill their tiles, with the plans for small and large weights;
    the product alone, and with norm, residual and SwiGLU."""
    error, dtype = 0.0, shape.dtype
    for rows, depth in _PRODUCTS:
        x, residual = _draw(0, (rows, depth), dtype), _draw(3, (rows, _OUTPUTS // 2), dtype)
        weight = _rounded(_draw(1, (_OUTPUTS, depth), dtype) / depth**0.5, dtype)
        gain = _draw(2, (depth,), dtype) / 2  # or rounding errors of gate and up would add up
        gate, up = np.split(_rms_norm(x, gain, dtype) @ weight.T, 2, axis=1)
        expected = x @ weight.T, gate / (1 + np.exp(-gate)) * up + residual
        a, w, r, g = (mx.array(array).astype(dtype) for array in (x, weight, residual, gain))
        for plan in {gemm_plan(rows, outputs) for outputs in (_OUTPUTS, 1 << 20)}:
            alone = skinny_gemm(a, w, plan=plan)
            fused = skinny_gemm(a, w, plan=plan, norm=RowNorm(g, _EPS), residual=r, swiglu=True)
            error = max(error, _largest((alone, fused), expected))
    return error, TOLERANCE[dtype]


def _rope_write(shape: AttentionShape) -> tuple[float, float]:
    dim = shape.k_head_dim
    weights = [_draw(seed, (dim,), shape.dtype) for seed in (7, 8)]
    some = dim // 4 * 2
    # Powers of two make every angle exact, so that the check compares only sines and cosines.
    freqs = mx.array(np.exp2(np.arange(some // 2) % 12).astype(np.float32))
    error = max(
        _rotated(shape, _SMALL_POSITIONS, Rope(dim, False, 10_000.0, 1.0, None), weights),
        _rotated(shape, _LARGE_POSITIONS, Rope(some, True, None, 1.0, freqs), None),
    )
    return error, TOLERANCE[shape.dtype]


def _rotated(
    shape: AttentionShape, positions: np.ndarray, how: Rope, weights: list[np.ndarray] | None
) -> float:
    """The largest error of one launch, in which every third row has no slot."""
    new, expected = _new_rows(shape, positions, how, weights)
    rows = len(positions)
    slots = np.random.default_rng(0).permutation(rows).astype(np.int32)
    slots[::3] = -1
    keys, values = (mx.zeros((rows, *a.shape[1:]), shape.dtype) for a in expected[1:])
    mx.eval(keys, values, new.arrays)
    q, token = rope_write(
        new, positions=mx.array(positions.astype(np.int32)), slot_mapping=mx.array(slots),
        keys=keys, values=values, token=new_token(),
    )  # fmt: skip
    for i in (1, 2):
        empty = np.zeros_like(expected[i])
        empty[slots[slots >= 0]] = expected[i][slots >= 0]
        expected[i] = empty
    return _largest((q, *_stored(keys, values, token)), expected)


def _fused_decode(shape: AttentionShape) -> tuple[float, float]:
    """Pairs (i, i + dims / 2), normalised and rotated, in one split and in several.

    If heads are small enough, `shared_prefix` serves a prefix of the longest row.
    """
    rope = Rope(shape.k_head_dim, False, 10_000.0, 1.0, None)
    weights = [_draw(seed, (shape.k_head_dim,), shape.dtype) for seed in (7, 8)]
    newest = np.maximum(_CONTEXTS - 1, 0)
    new, (q, *fresh) = _new_rows(shape, newest, rope, weights)
    width = -(-int(_CONTEXTS.max()) // _BLOCK)
    tables = np.random.default_rng(0).permutation(len(_CONTEXTS) * width).astype(np.int32)
    tables = tables.reshape(-1, width)
    slots = (tables[..., None] * _BLOCK + np.arange(_BLOCK)).reshape(len(tables), -1)
    before = [_draw(9, (slots.size, *rows.shape[1:]), shape.dtype) for rows in fresh]
    after = [rows.copy() for rows in before]
    written = np.flatnonzero(_CONTEXTS)
    at = slots[written, newest[written]]
    for old, filled, rows in zip(before, after, fresh, strict=True):
        old[at] = np.nan
        filled[at] = _rounded(rows[written], shape.dtype)
    expected = np.zeros((*q.shape[:2], shape.v_head_dim))
    scale, group = shape.k_head_dim**-0.5, shape.num_heads // shape.num_kv_heads
    for i in written:
        k, v = (np.repeat(a[slots[i, : _CONTEXTS[i]]], group, 1) for a in after)
        scores = np.einsum("hd,lhd->hl", _rounded(q[i], shape.dtype), k) * scale
        weight = np.exp(scores - scores.max(1, keepdims=True))
        expected[i] = np.einsum("hl,lhd->hd", weight / weight.sum(1, keepdims=True), v)
    where = mx.array(tables), mx.array(_CONTEXTS.astype(np.int32))
    longest = int(_CONTEXTS.argmax())
    lens = np.zeros(len(_CONTEXTS), np.int32)
    lens[longest] = newest[longest] // _BLOCK * _BLOCK
    shares = not head_size_problem((shape.k_head_dim, shape.v_head_dim), MAX_PREFILL_DIM)
    error = 0.0
    for plan, share in [(DecodePlan(1, 8), shares), (DecodePlan(4, 4), False)]:
        keys, values = (mx.array(a).astype(shape.dtype) for a in before)
        mx.eval(keys, values, new.arrays)
        token, prefix = new_token(), None
        if share:
            leader = mx.array([longest], mx.int32)
            prefix = shared_prefix(
                new, *where, leader, mx.array(lens), keys, values, token,
                block_size=_BLOCK, scale=scale, splits=2,
            )  # fmt: skip
            token = prefix.lse
        out, token = paged_decode(
            new, *where, keys, values, token,
            block_size=_BLOCK, scale=scale, plan=plan, prefix=prefix,
        )  # fmt: skip
        got = out, *_stored(keys, values, token)
        error = max(error, _largest(got, (expected, *after)))
    return error, TOLERANCE[shape.dtype]


def _new_rows(
    shape: AttentionShape, positions: np.ndarray, how: Rope, weights: list[np.ndarray] | None
) -> tuple[NewRows, list[np.ndarray]]:
    """New rows, joined and normalised if weights are given, and the expected q, k and v."""
    rows, kv_heads = len(positions), shape.num_kv_heads
    of_q, of_k = (shape.num_heads, shape.k_head_dim), (kv_heads, shape.k_head_dim)
    heads = of_q, of_k, (kv_heads, shape.v_head_dim)
    parts = [_draw(seed, (rows, *h), shape.dtype) for seed, h in enumerate(heads)]
    flat = [mx.array(p.reshape(rows, -1)).astype(shape.dtype) for p in parts]
    q, k, v = (Columns(a, 0) for a in flat)
    q_norm = k_norm = None
    if weights is not None:
        starts = np.cumsum([0, *(a.shape[1] for a in flat)]).tolist()
        joined = mx.concatenate(flat, axis=1)
        q, k, v = (Columns(joined, start) for start in starts[:3])
        q_norm, k_norm = (HeadNorm(mx.array(w).astype(shape.dtype), _EPS) for w in weights)
        parts[:2] = (_rms_norm(x, w, shape.dtype) for x, w in zip(parts[:2], weights, strict=True))
    turned = [_turn(x, positions, how) for x in parts[:2]]
    return NewRows(q, k, v, shape.num_heads, how, q_norm, k_norm), turned + parts[2:]


def _stored(keys: mx.array, values: mx.array, token: mx.array) -> tuple[mx.array, mx.array]:
    """All rows of a store, read by `kv_gather`."""
    everything = mx.arange(len(keys), dtype=mx.int32)
    k, v, _ = kv_gather(everything, keys, values, token)
    return k, v


def _largest(got: Sequence[mx.array], expected: Sequence[np.ndarray]) -> float:
    return max(largest_error(a, wanted) for a, wanted in zip(got, expected, strict=True))


def _turn(x: np.ndarray, positions: np.ndarray, how: Rope) -> np.ndarray:
    """Rotates pairs as complex numbers."""
    i = np.arange(how.dims // 2)
    rates = how.base ** (-2 * i / how.dims) if how.base is not None else 1 / np.array(how.freqs)
    first, second = (2 * i, 2 * i + 1) if how.traditional else (i, i + how.dims // 2)
    angles = how.scale * positions[:, None, None] * rates.astype(np.float64)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    x = x.copy()
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def _rms_norm(x: np.ndarray, weight: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    normed = _rounded(x / np.sqrt((x**2).mean(-1, keepdims=True) + _EPS), dtype)
    return _rounded(normed * weight, dtype)


def _draw(seed: int, dims: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    return _rounded(np.random.default_rng(seed).standard_normal(dims), dtype)


def _rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Values rounded to `dtype`, in float64."""
    rounded = mx.array(values.astype(np.float32)).astype(dtype).astype(mx.float32)
    return np.array(rounded).astype(np.float64)
