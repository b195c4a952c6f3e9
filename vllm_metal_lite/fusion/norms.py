"""Origins and rules of norms and sums.

y = norm(x)                  Normed: the next product may compute the norm
h = x + o_proj(y)            Sum: the next norm asks the product to add, or `add_rms_norm`
"""

from dataclasses import dataclass
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.fusion.context import fusion_context
from vllm_metal_lite.fusion.products import Product
from vllm_metal_lite.fusion.traced import Traced, as_view, origin_of, rows_of
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.recurrence.tracked_columns import columns_of


@dataclass(frozen=True, slots=True)
class Normed:
    """The RMS norm of rows (N, K), or of each head of x (N, 1, heads, K)."""

    x: mx.array
    norm: RMSNorm


@dataclass(frozen=True, slots=True)
class Sum:
    """x + y, of one shape and type."""

    x: mx.array
    y: mx.array

    def side(self, kind: type) -> tuple[Any, mx.array]:
        """(The origin of this kind, the other side), from the side that has such an origin; if no
        side has, (None, x)."""
        for side, other in ((self.y, self.x), (self.x, self.y)):
            if isinstance(origin_of(side), kind):
                return origin_of(side), other
        return None, self.x


# Rules


def norm(value: mx.array, x: mx.array, weight: mx.array | None, eps: float, **_: Any) -> mx.array:
    if x.ndim not in (3, 4) or (weight is not None and weight.dtype != x.dtype):
        return value
    return Traced(value, Normed(rows_of(x) if x.ndim == 3 else x, RMSNorm(weight, eps)))


def norm_sum(
    value: mx.array, x: Traced, weight: mx.array | None, eps: float, **how: Any
) -> mx.array:
    """A launch computes the sum, and x becomes its result.  With few rows, the previous
    product adds and the next products compute the norm; otherwise sum and norm are one launch."""
    shape, rows = x.shape[:-1], x.size // x.shape[-1]
    few = rows in fusion_context().kernels.skinny_rows and rows <= profile().max_normed_rows
    product, other = x.origin.side(Product)
    if few and product is not None:
        x.become(as_view(product(residual=rows_of(other)), shape))
        return mx.fast.rms_norm(x, weight, eps, **how)  # by the rule `norm`: x is no Sum now
    if "add_rms_norm" in fusion_context().kernels.unused:
        return norm(value, x, weight, eps)
    post, other = x.origin.side(Normed)
    y, post_norm = (rows_of(x.origin.y), None) if post is None else (post.x, post.norm)
    total, normed = add_rms_norm(rows_of(other), y, weight, eps, post_norm)
    x.become(as_view(total, shape))
    return as_view(normed, shape)


def add(value: mx.array, x: mx.array, y: Any) -> mx.array:
    alike = isinstance(y, mx.array) and (x.shape, x.dtype) == (y.shape, y.dtype)
    return Traced(value, Sum(x, y)) if alike and x.ndim == 3 else value


def add_clipped(value: mx.array, x: mx.array, y: mx.array) -> mx.array:
    """Gemma 3's residual sum, which clips in float16 only."""
    return value if x.dtype == mx.float16 else x + y


def norm_gated(value: mx.array, h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x after a recurrence, where x is a norm of h: one launch."""
    origin = origin_of(x)
    of_h = isinstance(origin, Normed) and origin.x is h and origin.norm.weight is not None
    if not of_h or gate.shape != h.shape or gate.dtype != h.dtype:
        return value
    if "gated_rms_norm" in fusion_context().kernels.unused:
        return value
    rows, z = h.reshape(len(h), -1), columns_of(gate)
    return gated_rms_norm(rows, z, *origin.norm, dim=h.shape[-1]).reshape(h.shape)
