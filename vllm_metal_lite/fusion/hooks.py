"""MLX functions that record an origin, or join a larger launch, during a fused forward.

Many classes call `mx.fast.rms_norm` and `mx.fast.rope`, so the functions are replaced, not the
modules.  A residual sum runs with the norm that follows, or with the product on one side of the
sum.  SwiGLU, or gelu times up, runs with the product before it.  The norm behind a recurrence runs
with its gate.
"""

from collections.abc import Callable, Collection
from functools import partial
from types import ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.attention.heads import Heads, Latents
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.fusion.origins import Activated, Multiplied, Normed, Scaled, Slice, Sum
from vllm_metal_lite.fusion.traced import (
    Function,
    Traced,
    as_view,
    gated_by,
    heads_of,
    origin_of,
    rows_of,
    up_to_date,
)
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.new_rows import Columns, Rope
from vllm_metal_lite.model.seam.hooks import Hook


def fused_functions(
    positions: mx.array,
    named: Collection[tuple[ModuleType, str]],
    skinny_rows: range,
    adds_norms: bool,
) -> list[Hook]:
    """positions: those of the step's rows.  For the other arguments see FusedLaunches."""
    fast = mx.fast
    return [
        (fast, "rms_norm", partial(_rms_norm, fast.rms_norm, skinny_rows, adds_norms)),
        (fast, "rope", partial(_rope, fast.rope, positions)),
        (nn, "gelu_approx", partial(_gelu_approx, nn.gelu_approx)),
        (mx, "split", partial(_split, mx.split)),
        (mx, "expand_dims", partial(_expand_dims, mx.expand_dims)),
        *((m, name, partial(_NAMED[name], getattr(m, name))) for m, name in named),
    ]


def _rms_norm(
    original: Function,
    skinny_rows: range,
    adds_norms: bool,
    x: mx.array,
    weight: mx.array | None,
    eps: float,
    **kwargs: Any,
) -> mx.array:
    origin, shape, rows = origin_of(x), x.shape[:-1], x.size // x.shape[-1]
    if isinstance(origin, Sum) and origin.total is None:
        # With few rows, the next products compute the norm; the sum joins the product before.
        few = rows in skinny_rows and rows <= profile().max_normed_rows
        total = _with_product(origin) if few else None
        if total is not None:
            origin.total = as_view(total, shape)
        elif adds_norms:
            one, other, of_other = _summands(origin)
            total, out = add_rms_norm(one, other, weight, eps, of_other)
            origin.total = as_view(total, shape)
            return as_view(out, shape)
    x = up_to_date(x)
    out, normed = original(x, weight, eps, **kwargs), _normed(x, RMSNorm(weight, eps))
    return out if normed is None else Traced(out, normed)


def _normed(x: mx.array, norm: RMSNorm) -> Latents | Heads | Normed | None:
    """The origin of a norm that a larger launch can compute."""
    origin = origin_of(x)
    if isinstance(origin, Slice) and norm.weight is not None:
        return Latents(origin, x.shape[-1], norm)
    if isinstance(origin, Heads):
        return origin.normed(norm)
    if x.ndim not in (3, 4) or (norm.weight is not None and norm.weight.dtype != x.dtype):
        return None
    return Normed(rows_of(x) if x.ndim == 3 else x, norm)


def _summands(origin: Sum) -> tuple[mx.array, mx.array, RMSNorm | None]:
    """The rows of both sides, and the norm that the sum applies to the second, if there is one."""
    for side, other in ((origin.y, origin.x), (origin.x, origin.y)):
        normed = origin_of(side)
        if isinstance(normed, Normed):
            return rows_of(other), normed.x, normed.norm
    return rows_of(origin.x), rows_of(origin.y), None


def _clip_residual(original: Function, x: mx.array, y: mx.array) -> mx.array:
    """Gemma 3's residual sum, which clips in float16 only."""
    return original(x, y) if x.dtype == mx.float16 else x + y


def _with_product(origin: Sum) -> mx.array | None:
    """The sum (N, K) from the product on one side of it; None if neither side is Multiplied."""
    for product, other in ((origin.y, origin.x), (origin.x, origin.y)):
        multiplied = origin_of(product)
        if isinstance(multiplied, Multiplied):
            return multiplied(residual=rows_of(other))
    return None


def _rope(original: Function, positions: mx.array, x: mx.array, dims: int, **how: Any) -> mx.array:
    out = original(x, dims, **how)
    if how["offset"] is not positions or x.ndim != 4 or x.shape[2] != 1:
        return out
    origin, factor = origin_of(x), 1.0
    if isinstance(origin, Scaled) and origin.dims == dims:
        factor, origin = origin.factor, origin.heads
    angles = how["traditional"], how["base"], how["scale"], how.get("freqs")
    heads = origin if isinstance(origin, Heads) else heads_of(x)
    rotated = heads.rotated(Rope(dims, *angles, factor))
    return out if rotated is None else Traced(out, rotated)


def _split(
    original: Callable[..., Any],
    x: mx.array,
    indices_or_sections: Any,
    axis: int = 0,
    **kwargs: Any,
) -> list[mx.array]:
    """Parts of packed rows (N, 1, K), and of heads (N, H, 1, D), know their columns."""
    parts = original(x, indices_or_sections, axis, **kwargs)
    at_indices = isinstance(indices_or_sections, list | tuple) and axis in (-1, x.ndim - 1)
    # Parts for recurrent layers know their columns already.
    if not at_indices or any(type(part) is not mx.array for part in parts):
        return parts
    starts = (0, *indices_or_sections)
    if x.ndim == 3 and x.shape[1] == 1:
        known = origin_of(x)
        rows = known if isinstance(known, Columns) else Columns(rows_of(x), 0)
        return [
            Traced(part, Slice(rows.array, rows.start + start))
            for part, start in zip(parts, starts, strict=True)
        ]
    if x.ndim == 4 and x.shape[2] == 1:
        heads = heads_of(x)
        if heads.norm is None and heads.rope is None:
            array, first, *_ = heads.columns
            stride = heads.stride or heads.head_dim
            for i, (part, at) in enumerate(zip(parts, starts, strict=True)):
                columns, dim = Columns(array, first + at), part.shape[-1]
                parts[i] = Traced(part, Heads(columns, heads.num_heads, dim, stride=stride))
    return parts


def _expand_dims(original: Function, x: mx.array, axis: Any, **kwargs: Any) -> mx.array:
    value, origin = original(x, axis, **kwargs), origin_of(x)
    return Traced(value, origin) if isinstance(origin, Latents) and axis == 1 else value


def _gated_norm(original: Function, h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, where x is a norm of h."""
    origin = origin_of(x)
    of_h = isinstance(origin, Normed) and origin.x is h and origin.norm.weight is not None
    if not of_h or gate.shape != h.shape:
        return original(h, gate, x)
    known = origin_of(gate)
    plain = known.plain if isinstance(known, Heads) else None
    z = plain or Columns(gate.reshape(len(gate), -1), 0)
    if z.array.dtype != h.dtype:
        return original(h, gate, x)
    rows = h.reshape(len(h), -1)
    return gated_rms_norm(rows, z, *origin.norm, dim=h.shape[-1]).reshape(h.shape)


def _swiglu(original: Function, gate: mx.array, up: mx.array) -> mx.array:
    fused = gated_by(origin_of(gate), origin_of(up), "silu", gate.shape)
    return original(gate, up) if fused is None else fused


def _gelu_approx(original: Function, x: mx.array) -> mx.array:
    columns = origin_of(x)
    joined = isinstance(columns, Columns) and isinstance(columns.origin, Multiplied)
    return Traced(original(x), Activated(columns, "gelu_approx")) if joined else original(x)


# By mlx-lm's names of the functions that they replace.
_NAMED: dict[str, Function] = {
    "swiglu": _swiglu,
    "precise_swiglu": _gated_norm,
    "clip_residual": _clip_residual,
}
