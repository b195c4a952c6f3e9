"""The kernels that norm, rotate and write new rows of a layer: when a model uses them, their
checks, and their timing beside MLX's operations.

The reference is NumPy on this machine's CPU, rounded where MLX's own norm and rotation round.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import rows_only, spec_of
from vllm_metal_lite.checks.check import AttentionCheck, Check, Loads, Pair
from vllm_metal_lite.checks.values import (
    EPS,
    ROWS,
    TOLERANCE,
    draw,
    largest_error,
    rms_norm,
    rounded,
    store_error,
)
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope
from vllm_metal_lite.kernels.cache_ops import kv_write
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.rope_write import NewRows, rope_write
from vllm_metal_lite.kernels.served_shapes import sees_prefixes
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.specs import AttentionShape, KernelUse, RopeShape

# With a base, a frequency is a float32 exp2, exact to two units in the last place.  The error of an
# angle grows with the position, and hides a wrong angle at a large one.  Given powers of two make
# every angle exact.
_FREQUENCY_ERROR = 2.4e-7
_SMALL_POSITION, _LARGE_POSITION = 100, 1_000_000


def checks(use: KernelUse) -> list[Check]:
    found = [check for pair in _pairs(use) for check in _checks(*pair, use)]
    return found + [Check("latent_write", *pair) for pair in _latent_pairs(use)]


def _checks(shape: AttentionShape, rope: RopeShape, use: KernelUse) -> list[Check]:
    """The fused decode is also checked in several splits, and after a shared prefix."""
    size = use.block_size
    checks = [
        Check("rope_write", rows_only(shape), 0, rope),
        Check("fused_decode", shape, size, rope),
        Check("merge_partitions", shape, size, rope, ("fused_decode",)),
    ]
    if use.shares_prefix and sees_prefixes(shape):
        checks.append(Check("shared_prefix", shape, size, rope, ("fused_decode",)))
    return checks


def _pairs(use: KernelUse) -> list[tuple[AttentionShape, RopeShape]]:
    """Each shape and each rotation at least once, not each with each."""
    found = []
    for dim in sorted({shape.k_head_dim for shape in use.shapes}):
        shapes = [s for s in use.shapes if s.k_head_dim == dim and not s.latent]
        ropes = [r for r in use.ropes if r.dims % 2 == 0 and 2 <= r.dims <= dim]
        for i in range(max(len(shapes), len(ropes)) if shapes and ropes else 0):
            found.append((shapes[i % len(shapes)], ropes[i % len(ropes)]))
    return found


def _latent_pairs(use: KernelUse) -> list[tuple[AttentionShape, int, RopeShape]]:
    """Latent shapes with the rotations of their rotary keys, which are not normalised."""
    return [
        (rows_only(shape), 0, replace(rope, eps=None))
        for shape in use.shapes
        for rope in use.ropes
        if shape.latent and rope.dims == shape.v_head_dim
    ]


def write(check: AttentionCheck) -> float:
    """The launches for few rows and for many rows differ; that of latents is for few."""
    counts = (ROWS,) if check.kernel == "latent_write" else (ROWS, profile().rope_many_rows)
    return max(_written(check, count) for count in counts)


def _written(check: AttentionCheck, rows: int) -> float:
    """New rows written to an empty store; every third row has no slot."""
    last = _LARGE_POSITION if _is_exact(check) else _SMALL_POSITION
    positions = np.linspace(0, last, rows).astype(np.int64)
    launch, new, (q, *fresh) = launch_and_rows(check, positions)
    spec = spec_of(check.shape)
    slots = np.random.default_rng(0).permutation(rows).astype(np.int32)
    slots[::3] = -1
    keys, values = (
        mx.zeros((rows, spec.num_kv_heads, row.width), row.kept_dtype)
        for row in (spec.k_row, spec.v_row)
    )
    mx.eval(keys, values)
    store = LayerStore(keys, values, new_ticket(), spec)
    out, ticket = launch(new, mx.array(slots), store)
    mx.eval(out, ticket)
    expected = [np.zeros_like(a) for a in fresh]
    for empty, a in zip(expected, fresh, strict=True):
        empty[slots[slots >= 0]] = a[slots >= 0]
    rounding = tolerance(check, last)
    return max(largest_error(out, q, rounding), store_error(store, expected, rounding))


def tolerance(check: AttentionCheck, last: int) -> float:
    """The allowed error.  last: the largest position."""
    angle = 0.0 if _is_exact(check) else _FREQUENCY_ERROR * last
    return TOLERANCE[check.shape.dtype] + angle


def _is_exact(check: AttentionCheck) -> bool:
    """Whether only sines and cosines are rounded."""
    assert check.rope is not None
    return check.rope.base is None and check.rope.scale == 1


def launch_and_rows(
    check: AttentionCheck, positions: np.ndarray
) -> tuple[Callable[..., tuple[mx.array, mx.array]], NewRows | NewLatents, list[np.ndarray]]:
    """The launch that writes new rows, such rows, and the expected results."""
    assert check.rope is not None
    if check.kernel == "latent_write":
        return latent_write, *new_latents(check.shape, positions, check.rope)
    return rope_write, *new_rows(check.shape, positions, check.rope)


def new_rows(
    shape: AttentionShape, positions: np.ndarray, rope_shape: RopeShape
) -> tuple[NewRows, list[np.ndarray]]:
    """New rows in one array, and the expected q, k and v."""
    rng, rows, dim = np.random.default_rng(5), len(positions), shape.k_head_dim
    sizes = (shape.num_heads, dim), (shape.num_kv_heads, dim)
    heads = (*sizes, (shape.num_kv_heads, shape.v_head_dim))
    parts = [draw(rng, (rows, *h), shape.dtype) for h in heads]
    flat = [p.reshape(rows, -1) for p in parts]
    starts = np.cumsum([0, *(a.shape[1] for a in flat)]).tolist()
    joined = mx.array(np.concatenate(flat, 1)).astype(shape.dtype)
    q, k, v = (Columns(joined, start) for start in starts[:3])
    q_norm = k_norm = None
    if rope_shape.eps is not None:
        weights = [draw(rng, (dim,), shape.dtype) for _ in range(2)]
        q_norm, k_norm = (RMSNorm(mx.array(w).astype(shape.dtype), rope_shape.eps) for w in weights)
        parts[:2] = (
            rms_norm(x, w, rope_shape.eps, shape.dtype)
            for x, w in zip(parts[:2], weights, strict=True)
        )
    rope, rates = _rope(rope_shape)
    rotated = [_rotate(x, positions, rope_shape, rates, shape.dtype) for x in parts[:2]]
    norms, where = (q_norm, k_norm), mx.array(positions.astype(np.int32))
    new = NewRows(q, k, v, shape.num_heads, rope, *norms, where)
    return new, rotated + parts[2:]


def new_latents(
    shape: AttentionShape, positions: np.ndarray, rope_shape: RopeShape
) -> tuple[NewLatents, list[np.ndarray]]:
    """New rows of a latent layer in two arrays, as projections make them, and the expected rotary
    queries, latents and rotary keys."""
    rng, rows = np.random.default_rng(5), len(positions)
    latent_dim, rope, heads = shape.k_head_dim, shape.v_head_dim, shape.num_heads
    q = draw(rng, (rows, heads, 2 * rope), shape.dtype)
    kv = draw(rng, (rows, 1, latent_dim + rope), shape.dtype)
    weight = draw(rng, (latent_dim,), shape.dtype)
    joined, queries = (mx.array(a.reshape(rows, -1)).astype(shape.dtype) for a in (kv, q))
    norm = RMSNorm(mx.array(weight).astype(shape.dtype), EPS)
    new_rope, rates = _rope(rope_shape)
    latent, k_pe = Columns(joined, 0), Columns(joined, latent_dim)
    columns = Columns(queries, rope), 2 * rope, heads, latent, k_pe
    new = NewLatents(*columns, norm, new_rope, mx.array(positions.astype(np.int32)))
    rotary_q, rotary_k = (
        _rotate(x, positions, rope_shape, rates, shape.dtype)
        for x in (q[..., rope:], kv[..., latent_dim:])
    )
    return new, [rotary_q, rms_norm(kv[..., :latent_dim], weight, EPS, shape.dtype), rotary_k]


def _rotate(
    x: np.ndarray, positions: np.ndarray, rope_shape: RopeShape, rates: np.ndarray, dtype: mx.Dtype
) -> np.ndarray:
    """Rotates pairs as complex numbers."""
    i, x = np.arange(rope_shape.dims // 2), x.copy()
    if rope_shape.factor != 1:
        factor, head = rounded(np.array(rope_shape.factor), dtype), x[..., : rope_shape.dims]
        x[..., : rope_shape.dims] = rounded(factor * head, dtype)
    first, second = (2 * i, 2 * i + 1) if rope_shape.traditional else (i, i + rope_shape.dims // 2)
    angles = rope_shape.scale * positions[:, None, None] * rates
    rotated = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    x[..., first], x[..., second] = rotated.real, rotated.imag
    return x


def _rope(rope_shape: RopeShape) -> tuple[Rope, np.ndarray]:
    """The arguments of a rotation, and the angle of each pair at position 1."""
    freqs, rates = None, 1 / np.exp2(np.arange(rope_shape.dims // 2) % 12)
    if rope_shape.base is None:
        freqs = mx.array((1 / rates).astype(np.float32))
    else:
        rates = rope_shape.base ** (-2 * np.arange(rope_shape.dims // 2) / rope_shape.dims)
    how = rope_shape.traditional, rope_shape.base, rope_shape.scale, freqs, rope_shape.factor
    return Rope(rope_shape.dims, *how), rates


def timed_write(check: AttentionCheck, loads: Loads) -> list[Pair]:
    """One launch for the new rows of prompts, and one each for norm, rotation and kv_write."""
    positions, spec = np.arange(loads.rows), spec_of(check.shape)
    launch, new, _ = launch_and_rows(check, positions)
    store = PagedStore([spec], -(-loads.rows // 16), 16)
    layer = LayerStore(store.keys[0], store.values[0], new_ticket(), spec)
    where = new.positions  # a row's slot is its position
    mx.eval([columns.array for columns in new if isinstance(columns, Columns)], where, layer.ticket)

    def unfused() -> object:
        if isinstance(new, NewLatents):
            q, k, v = _latents_by_mlx(new, check.shape, where)
        else:
            q, k, v = _rows_by_mlx(new, check.shape, where)
        return q, kv_write(k, v, where, layer)

    return [(partial(launch, new, where, layer), unfused)]


def _rows_by_mlx(new: NewRows, shape: AttentionShape, where: mx.array) -> list[mx.array]:
    """Rotated queries and keys, and values."""
    assert new.rope is not None
    parts = mx.split(new.q.array, (new.k.start, new.v.start), axis=1)
    dims = shape.k_head_dim, shape.k_head_dim, shape.v_head_dim
    q, k, v = (x.reshape(len(x), -1, 1, dim) for x, dim in zip(parts, dims, strict=True))
    q, k = (
        _rotate_by_mlx(mx.fast.rms_norm(x, norm.weight, norm.eps) if norm else x, new.rope, where)
        for x, norm in ((q, new.q_norm), (k, new.k_norm))
    )
    return [q, k.squeeze(2), v.squeeze(2)]


def _latents_by_mlx(new: NewLatents, shape: AttentionShape, where: mx.array) -> list[mx.array]:
    """Rotary queries, latents and rotary keys."""
    q = new.q.array.reshape(len(where), shape.num_heads, 1, -1)[..., -shape.v_head_dim :]
    latents, k_pe = mx.split(new.latent.array, [shape.k_head_dim], axis=1)
    latents = mx.fast.rms_norm(latents, new.norm.weight, new.norm.eps)[:, None]
    rotary = _rotate_by_mlx(k_pe[:, None, None], new.rope, where).squeeze(2)
    return [_rotate_by_mlx(q, new.rope, where), latents, rotary]


def _rotate_by_mlx(x: mx.array, rope: Rope, where: mx.array) -> mx.array:
    """The heads x rotated to the positions `where`."""
    if rope.factor != 1:
        x = x.at[..., : rope.dims].multiply(rope.factor)
    how: dict[str, Any] = {"traditional": rope.traditional, "base": rope.base, "freqs": rope.freqs}
    return mx.fast.rope(x, rope.dims, **how, scale=rope.scale, offset=where)
