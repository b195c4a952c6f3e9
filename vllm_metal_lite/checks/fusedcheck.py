"""Checks the kernels that replace MLX operations around attention on this device.

The reference is computed in NumPy on this machine's CPU, rounded where MLX's own norm and rotation
round.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import CONTEXTS, Case, case_of, draw, padded, rounded
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.common import YARN_FACTOR
from vllm_metal_lite.checks.result import TOLERANCE, largest_error
from vllm_metal_lite.checks.selfcheck import (
    PREFIX_SPLITS,
    SHARING,
    SPLIT,
    WHOLE,
    Found,
    decode_arrays,
    largest,
    stored_error,
)
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.add_rms_norm import PostNorm, add_rms_norm
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.new_rows import Columns, HeadNorm, NewRows, Rope
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.shared_prefix import shared_prefix
from vllm_metal_lite.kernels.skinny_gemm import RowNorm, gemm_plan, skinny_gemm
from vllm_metal_lite.kernels.weights import READABLE, Weight, dequantised, quantised
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.specs import AttentionShape, KernelUse, Rotation, WeightShape

_EPS = 1e-5
_ROWS = 9  # see case.CONTEXTS
# With a base, a frequency is a float32 exp2, right to two units in the last place, and the error of
# an angle grows with the position.  Given powers of two make every angle exact.
_FREQUENCY_ERROR = 2.4e-7
_SMALL_POSITION, _LARGE_POSITION = 100, 1_000_000
_MOST_OUTPUTS = 256


def full_list() -> list[KernelUse]:
    """Uses that vary each dimension in turn: many more than a model has."""
    shapes = []
    for dtype in TOLERANCE:
        shapes += [AttentionShape(*h, 64, 64, dtype) for h in ((4, 4), (5, 1), (16, 8), (71, 1))]
        shapes += [
            AttentionShape(4, 2, *d, dtype)
            for d in ((32, 32), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512))
        ]
        shapes += [
            AttentionShape(8, 2, *d, dtype, kv_bits=bits)
            for bits in (8, 4)
            for d in ((80, 80), (128, 128), (192, 128), (256, 256))
        ]
    quantised_weights = [WeightShape(100, depth, how) for how in READABLE for depth in (128, 1152)]
    return [
        KernelUse(
            (shape,),
            16,
            (
                Rotation(shape.k_head_dim, eps=_EPS),
                Rotation(
                    shape.k_head_dim // 4 * 2, traditional=True, base=None, factor=YARN_FACTOR
                ),
            ),
            (shape.num_heads * shape.k_head_dim, 1001),
            (WeightShape(100, 96), WeightShape(100, 1056), *quantised_weights),
        )
        for shape in shapes
    ]


def normed_sum(check: Check) -> Found:
    """Rows of the model's hidden size, as they are and behind a norm of their own."""
    (dim,), dtype, rng = check.sizes, check.shape.dtype, np.random.default_rng(0)
    x, y = (draw(rng, (_ROWS, dim), dtype) for _ in range(2))
    weight = draw(rng, (dim,), dtype)
    a, b, gain = (mx.array(array).astype(dtype) for array in (x, y, weight))
    error = 0.0
    for norm in (None, PostNorm(gain, _EPS)):
        added = rounded(x + (y if norm is None else _rms_norm(y, weight, _EPS, dtype)), dtype)
        got = add_rms_norm(a, b, gain, _EPS, norm)
        error = max(error, largest(got, (added, _rms_norm(added, weight, _EPS, dtype))))
    return error, TOLERANCE[dtype]


def product(check: Check) -> Found:
    """With norm, SwiGLU and residual, or with bias and gelu (see plan.py: PRODUCT_ROWS).  As the
    weight's number of outputs plans it, but with few outputs."""
    (rows, outputs, depth), dtype = check.sizes, check.shape.dtype
    width, rng = min(outputs, _MOST_OUTPUTS) // 2 * 2, np.random.default_rng(0)
    x = draw(rng, (rows, depth), dtype) / 2  # or rounding errors of gate and up would add up
    plan = gemm_plan(rows, WeightShape(outputs, depth, check.quantisation))
    weight = rounded(draw(rng, (width, depth), dtype) / depth**0.5, dtype)
    a, plain = (mx.array(array).astype(dtype) for array in (x, weight))
    w: Weight = plain
    if check.quantisation:
        w = quantised(plain, check.quantisation)
        weight = rounded(dequantised(w), dtype)
    gate_columns = weight[: width // 2].T, weight[width // 2 :].T
    if rows % 4 == 0:
        bias = draw(rng, (width,), dtype) / 2
        halves = zip(gate_columns, np.split(bias, 2), strict=True)
        gate, up = (x @ columns + b for columns, b in halves)
        fused = skinny_gemm(a, w, plan=plan, bias=mx.array(bias).astype(dtype), gate="gelu_approx")
        return largest([fused], [_gelu(gate) * up]), TOLERANCE[dtype]
    residual = draw(rng, (rows, width // 2), dtype)
    gain = draw(rng, (depth,), dtype) / 2
    normed = _rms_norm(x, gain, _EPS, dtype)
    gate, up = (normed @ columns for columns in gate_columns)
    r, g = (mx.array(array).astype(dtype) for array in (residual, gain))
    fused = skinny_gemm(a, w, plan=plan, norm=RowNorm(g, _EPS), residual=r, gate="silu")
    expected = gate / (1 + np.exp(-gate)) * up + residual
    return largest([fused], [expected]), TOLERANCE[dtype]


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def written(check: Check) -> Found:
    """Few rows and many, of which every third has no slot."""
    assert check.rotation is not None
    last = _LARGE_POSITION if _is_exact(check.rotation) else _SMALL_POSITION
    tolerance = _tolerance(check, last)
    found = [
        _written(check, np.linspace(0, last, rows).astype(np.int64), tolerance)
        for rows in (_ROWS, profile().rope_many_rows)
    ]
    return max(found)


def _is_exact(rotation: Rotation) -> bool:
    """Whether sines and cosines are all that rounds."""
    return rotation.base is None and rotation.scale == 1


def _tolerance(check: Check, last: int) -> float:
    """last: the largest position."""
    assert check.rotation is not None
    angle = 0.0 if _is_exact(check.rotation) else _FREQUENCY_ERROR * last
    return TOLERANCE[check.shape.dtype] + angle


def _written(check: Check, positions: np.ndarray, tolerance: float) -> Found:
    assert check.rotation is not None
    s, rows = check.shape, len(positions)
    new, (q, *fresh) = new_rows(s, positions, check.rotation)
    spec = LayerSpec(s.num_kv_heads, s.k_head_dim, s.v_head_dim, s.dtype, bits=s.kv_bits)
    slots = np.random.default_rng(0).permutation(rows).astype(np.int32)
    slots[::3] = -1
    keys, values = (
        mx.zeros((rows, s.num_kv_heads, row.width), row.kept_dtype)
        for row in (spec.k_row, spec.v_row)
    )
    mx.eval(keys, values, new.arrays)
    out, token = rope_write(
        new, positions=mx.array(positions.astype(np.int32)), slot_mapping=mx.array(slots),
        keys=keys, values=values, token=new_token(), spec=spec,
    )  # fmt: skip
    mx.eval(out, token)
    expected = [np.zeros_like(a) for a in fresh]
    for empty, a in zip(expected, fresh, strict=True):
        empty[slots[slots >= 0]] = a[slots >= 0]
    return _found(largest_error(out, q), (keys, values), spec, expected, tolerance)


def latents_written(check: Check) -> Found:
    """Latents, rotary keys and queries, of which every third row has no slot."""
    assert check.rotation is not None
    last = _LARGE_POSITION if _is_exact(check.rotation) else _SMALL_POSITION
    s, positions = check.shape, np.linspace(0, last, _ROWS).astype(np.int64)
    new, (q, *fresh) = new_latents(s, positions, check.rotation)
    spec = LayerSpec(1, s.k_head_dim, s.v_head_dim, s.dtype, bits=s.kv_bits)
    slots = np.random.default_rng(0).permutation(_ROWS).astype(np.int32)
    slots[::3] = -1
    store = [mx.zeros((_ROWS, 1, r.width), r.kept_dtype) for r in (spec.k_row, spec.v_row)]
    arrays = (new.q.array, new.latent.array, new.norm.weight)
    mx.eval(store, arrays)
    out, token = latent_write(
        new, positions=mx.array(positions.astype(np.int32)), slot_mapping=mx.array(slots),
        keys=store[0], values=store[1], token=new_token(), spec=spec,
    )  # fmt: skip
    mx.eval(out, token)
    expected = [np.zeros_like(a) for a in fresh]
    for empty, a in zip(expected, fresh, strict=True):
        empty[slots[slots >= 0]] = a[slots >= 0]
    return _found(largest_error(out, q), store, spec, expected, _tolerance(check, last))


def new_latents(
    shape: AttentionShape, positions: np.ndarray, rotation: Rotation
) -> tuple[NewLatents, list[np.ndarray]]:
    """New rows of a latent layer in two arrays, as projections make them, and the expected rotary
    queries, latents and rotary keys."""
    rng, rows = np.random.default_rng(5), len(positions)
    rank, rope, heads = shape.k_head_dim, shape.v_head_dim, shape.num_heads
    q = draw(rng, (rows, heads, 2 * rope), shape.dtype)
    kv = draw(rng, (rows, 1, rank + rope), shape.dtype)
    weight = draw(rng, (rank,), shape.dtype)
    joined, queries = (mx.array(a.reshape(rows, -1)).astype(shape.dtype) for a in (kv, q))
    norm = HeadNorm(mx.array(weight).astype(shape.dtype), _EPS)
    turn, rates = _rope(rotation)
    new = NewLatents(
        Columns(queries, rope),
        2 * rope,
        heads,
        Columns(joined, 0),
        Columns(joined, rank),
        norm,
        turn,
    )
    q_pe, k_pe = (
        _turn(x, positions, rotation, rates, shape.dtype) for x in (q[..., rope:], kv[..., rank:])
    )
    return new, [q_pe, _rms_norm(kv[..., :rank], weight, _EPS, shape.dtype), k_pe]


def _rope(rotation: Rotation) -> tuple[Rope, np.ndarray]:
    """The arguments of a rotation, and the angle of each pair at position 1."""
    freqs, rates = None, 1 / np.exp2(np.arange(rotation.dims // 2) % 12)
    if rotation.base is None:
        freqs = mx.array((1 / rates).astype(np.float32))
    else:
        rates = rotation.base ** (-2 * np.arange(rotation.dims // 2) / rotation.dims)
    how = rotation.traditional, rotation.base, rotation.scale, freqs, rotation.factor
    return Rope(rotation.dims, *how), rates


def _found(
    error: float, store: Sequence[mx.array], spec: LayerSpec, expected: Sequence[np.ndarray],
    tolerance: float,
) -> Found:  # fmt: skip
    """error: of rows that are not in the store.  Of a quantised store errors are fractions."""
    stored = stored_error(store, spec, expected, tolerance)
    if spec.bits is None:
        return max(error, stored), tolerance
    return max(error / tolerance, stored), 1.0


def decode(check: Check, plan: DecodePlan, shares: bool = False) -> Found:
    """Decodes that normalise, rotate and write their own rows; shares: some share a prefix."""
    assert check.rotation is not None
    case = case_of(check.shape, check.block_size)
    batch, lens = case.sharing(SHARING) if shares else (case.decodes, np.zeros(0, np.int32))
    new, (q, *fresh) = new_rows(check.shape, padded(CONTEXTS - 1), check.rotation)
    before, after = _newest(case, fresh)
    where, how = decode_arrays(batch), case.how()
    formats = case.spec.k_row, case.spec.v_row
    keys, values = (
        mx.array(kept).astype(row.kept_dtype) for row, kept in zip(formats, before, strict=True)
    )
    mx.eval(keys, values, new.arrays)
    token, prefix = new_token(), None
    if shares:
        of_prefix = {name: how[name] for name in ("block_size", "scale", "softcap")}
        prefix = shared_prefix(
            new, *where, mx.array([len(CONTEXTS) - 1], mx.int32), mx.array(padded(lens)), keys,
            values, token, splits=PREFIX_SPLITS, spec=case.spec, **of_prefix,
        )  # fmt: skip
        token = prefix.lse
    out, token = paged_decode(
        new, *where, keys, values, token, plan=plan, prefix=prefix, spec=case.spec, **how
    )
    mx.eval(out, token)
    stored = [
        np.array(row.unpack(kept).astype(mx.float32))
        for row, kept in zip(formats, (keys, values), strict=True)
    ]
    expected = case.expected(batch, rounded(q[:-1], check.shape.dtype), *stored)
    error, tolerance = largest_error(out, padded(expected)), _tolerance(check, int(CONTEXTS.max()))
    return _found(error, (keys, values), case.spec, after, tolerance)


def _newest(case: Case, fresh: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the case's store holds before the newest rows are written, and the values after."""
    before, after = [], []
    for kept, rows, new in zip(case.kept, (case.keys, case.values), fresh, strict=True):
        before.append(kept.copy())
        after.append(rows.copy())
        before[-1][case.newest] = 0xFFFFFFFF if case.spec.bits else np.nan
        after[-1][case.newest] = rounded(new[:-1], case.shape.dtype)
    return before, after


def new_rows(
    shape: AttentionShape, positions: np.ndarray, rotation: Rotation
) -> tuple[NewRows, list[np.ndarray]]:
    """New rows in one array, and the expected q, k and v."""
    rng, rows, dim = np.random.default_rng(5), len(positions), shape.k_head_dim
    heads = (
        (shape.num_heads, dim), (shape.num_kv_heads, dim), (shape.num_kv_heads, shape.v_head_dim)
    )  # fmt: skip
    parts = [draw(rng, (rows, *h), shape.dtype) for h in heads]
    flat = [p.reshape(rows, -1) for p in parts]
    starts = np.cumsum([0, *(a.shape[1] for a in flat)]).tolist()
    joined = mx.array(np.concatenate(flat, 1)).astype(shape.dtype)
    q, k, v = (Columns(joined, start) for start in starts[:3])
    q_norm = k_norm = None
    if rotation.eps is not None:
        weights = [draw(rng, (dim,), shape.dtype) for _ in range(2)]
        q_norm, k_norm = (HeadNorm(mx.array(w).astype(shape.dtype), rotation.eps) for w in weights)
        parts[:2] = (
            _rms_norm(x, w, rotation.eps, shape.dtype)
            for x, w in zip(parts[:2], weights, strict=True)
        )
    rope, rates = _rope(rotation)
    turned = [_turn(x, positions, rotation, rates, shape.dtype) for x in parts[:2]]
    new = NewRows(q, k, v, shape.num_heads, rope, q_norm, k_norm)
    return new, turned + parts[2:]


def _turn(
    x: np.ndarray, positions: np.ndarray, rotation: Rotation, rates: np.ndarray, dtype: mx.Dtype
) -> np.ndarray:
    """Rotates pairs as complex numbers."""
    i, x = np.arange(rotation.dims // 2), x.copy()
    if rotation.factor != 1:
        factor, head = rounded(np.array(rotation.factor), dtype), x[..., : rotation.dims]
        x[..., : rotation.dims] = rounded(factor * head, dtype)
    first, second = (2 * i, 2 * i + 1) if rotation.traditional else (i, i + rotation.dims // 2)
    angles = rotation.scale * positions[:, None, None] * rates
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, dtype: mx.Dtype) -> np.ndarray:
    square = (x.astype(np.float64) ** 2).mean(-1, keepdims=True)
    return rounded(rounded(x / np.sqrt(square + eps), dtype) * weight, dtype)


# The kernels that serve new rows; "merge_partitions" and "shared_prefix" with a rotation.
CHECKS: dict[str, Callable[[Check], Found]] = {
    "rope_write": written,
    "latent_write": latents_written,
    "add_rms_norm": normed_sum,
    "fused_decode": lambda check: decode(check, WHOLE),
    "merge_partitions": lambda check: decode(check, SPLIT),
    "shared_prefix": lambda check: decode(check, WHOLE, shares=True),
    "skinny_gemm": product,
}
