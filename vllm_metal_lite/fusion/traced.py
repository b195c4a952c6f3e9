"""Arrays that record their origin, so that several launches can become one.

A `Traced` array has a lazy value like any other array.  A fused kernel (projection columns, norm,
RoPE, store write; or norm, product, sum) starts from the recorded origin, so MLX never computes
the intermediate.  The rules name no architecture; an operation that does not fit is not fused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_metal_lite.attention.heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.origins import (
    Activated,
    Attended,
    Chosen,
    Multiplied,
    Negated,
    Scaled,
    Sum,
    Weighted,
    Widened,
)
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.skinny_gemm import Gate
from vllm_metal_lite.model.seam.layer_cache import RotaryKeys
from vllm_metal_lite.model.seam.scaling import ScalingAt
from vllm_metal_lite.recurrence.columns import ColumnsOf

# A function of MLX or of a model, or what replaces it.
Function = Callable[..., mx.array]


def heads_of(x: mx.array) -> Heads:
    """The origin of x (N, num_heads, 1, head_dim), or x itself if the origin is unknown."""
    origin = origin_of(x)
    if isinstance(origin, Heads):
        return origin
    rows, heads, _, dim = x.shape
    return Heads(Columns(x.reshape(rows, heads * dim), 0), heads, dim)


class Traced(ColumnsOf):
    """An array and its origin: one of origins.py, of a router (routing.py), Columns (of a product),
    Heads, Latents or None.

    Heads and Attended arrays are (N, 1, num_heads, head_dim) or (N, num_heads, 1, head_dim): the
    same memory layout.
    rows: (N, K), if the array is a view of them as (.., K).  Models use the view, kernels the rows.
    """

    def __init__(self, value: mx.array, origin: Any, rows: mx.array | None = None) -> None:
        super().__init__(value, origin)
        self.rows = rows

    def forget(self) -> None:
        self.origin = self.rows = None

    @property
    def columns(self) -> Columns | None:
        return self.origin.plain if isinstance(self.origin, Heads) else super().columns

    @property
    def _own_columns(self) -> Columns | None:
        """All columns of the rows, of a product that is not joined."""
        rows = self.rows
        if rows is None or self.ndim != 3 or len(rows) != len(self):
            return None
        return Columns(rows, 0, self.origin)

    def reshape(self, *shape: Any, **kwargs: Any) -> mx.array:
        value, origin = mx.array.reshape(self, *shape, **kwargs), self.origin
        if value.ndim == 4 and value.shape[:2] == (len(self), 1):
            columns = origin if isinstance(origin, Columns) else self._own_columns
            if columns is not None:
                return Traced(value, Heads(columns, value.shape[2], value.shape[3]))
        if isinstance(origin, Attended) and value.shape[:-1] == (len(self), 1):
            return as_view(origin.rows.reshape(len(self), -1), value.shape[:-1])
        return value

    def transpose(self, *axes: Any, **kwargs: Any) -> mx.array:
        value = super().transpose(*axes, **kwargs)
        same = axes in ((0, 2, 1, 3), ((0, 2, 1, 3),)) and isinstance(self.origin, Heads | Attended)
        return Traced(value, self.origin) if same else value

    def swapaxes(self, axis1: int, axis2: int, **kwargs: Any) -> mx.array:
        value = super().swapaxes(axis1, axis2, **kwargs)
        same = {axis1, axis2} == {1, 2} and isinstance(self.origin, Heads | Attended)
        return Traced(value, self.origin) if same else value

    def sum(self, axis: Any = None, *args: Any, **kwargs: Any) -> mx.array:
        origin = self.origin
        of_experts = isinstance(origin, Weighted) and not origin.summed
        if of_experts and axis == -2 and not args and not kwargs:
            return _summed(origin, self.dtype)
        value = super().sum(axis, *args, **kwargs)
        by_row = axis == -1 and not args and kwargs == {"keepdims": True}
        return _by_rule(self, "on_sum", value) if by_row else value

    def astype(self, dtype: mx.Dtype, *args: Any, **kwargs: Any) -> mx.array:
        origin = self.origin
        if isinstance(origin, Weighted) and origin.summed and origin.experts.rows.dtype == dtype:
            return self if self.dtype == dtype else _summed(origin, dtype)
        value = super().astype(dtype, *args, **kwargs)
        if dtype != mx.float32 or not self._may_score:
            return value
        return _by_rule(self, "on_widen", Traced(value, Widened(self)))

    def __matmul__(self, other: Any) -> mx.array:
        # Python asks this class first, and MLX's product knows no placeholder.
        if isinstance(other, RotaryKeys):
            return other.__rmatmul__(self)
        if isinstance(other, mx.array) and (self.ndim, other.ndim) == (3, 2):
            return as_view(rows_of(up_to_date(self)) @ other, self.shape[:-1])
        return super().__matmul__(other)

    def __add__(self, other: Any) -> mx.array:
        return _add(self, other)

    def __radd__(self, other: Any) -> mx.array:
        return _add(other, self)

    def __neg__(self) -> mx.array:
        value = super().__neg__()
        return Traced(value, Negated(self)) if self._may_score else value

    @property
    def _may_score(self) -> bool:
        """Whether this may be a router's scores, or its logits."""
        return self.rows is not None or hasattr(self.origin, "on_widen")

    def __getitem__(self, key: Any) -> mx.array:
        return _by_rule(self, "on_getitem", mx.array.__getitem__(self, key), key)

    @property
    def at(self) -> Any:
        origin, at = self.origin, super().at
        if not isinstance(origin, Heads):
            return at

        def noted(value: mx.array, dims: int, factor: float) -> mx.array:
            return Traced(value, Scaled(origin, factor, dims))

        return ScalingAt(self, at, noted)

    def __truediv__(self, other: Any) -> mx.array:
        return _by_rule(self, "on_div", super().__truediv__(other), other)

    def __itruediv__(self, other: Any) -> Any:
        quotient = self / other
        if type(quotient) is not Traced:
            return super().__itruediv__(other)
        self.set_value(quotient)
        self.origin, self.rows = quotient.origin, quotient.rows
        return self

    def __mul__(self, other: Any) -> mx.array:
        x, y = up_to_date(self), up_to_date(other)
        origin = origin_of(x)
        if isinstance(origin, Activated) and isinstance(y, mx.array) and x.shape == y.shape:
            gated = gated_by(origin.columns, origin_of(y), origin.activation, x.shape)
            if gated is not None:
                return gated
        value = mx.multiply(x, y)
        if isinstance(origin, Heads) and isinstance(y, float):
            return Traced(value, Scaled(origin, y, origin.head_dim))
        if not isinstance(origin, Chosen) or not isinstance(y, mx.array):
            return _by_rule(x, "on_mul", value, y)
        # One weight for each expert's result; its type may differ.
        if y.shape != (*origin.shape[:-1], 1) or not mx.issubdtype(y.dtype, mx.floating):
            return value
        return Traced(value, Weighted(origin, y.reshape(-1, origin.shape[-2])))

    def __rmul__(self, other: Any) -> mx.array:
        return self * other


def _add(x: Any, y: Any) -> mx.array:
    x, y = up_to_date(x), up_to_date(y)
    value = mx.add(x, y)
    arrays = isinstance(x, mx.array) and isinstance(y, mx.array)
    if arrays and x.shape == y.shape and x.dtype == y.dtype and value.ndim == 3:
        return Traced(value, Sum(x, y))
    return _by_rule(x, "on_add", value, y)


def _by_rule(x: Any, rule: str, value: mx.array, *args: Any) -> mx.array:
    """The result of the rule that x's origin has for an operation, or else the plain `value`."""
    apply = getattr(origin_of(x), rule, None)
    return value if apply is None else apply(value, *args)


def _summed(origin: Weighted, dtype: mx.Dtype) -> mx.array:
    rows = origin.sum(dtype)
    return as_view(rows, origin.experts.shape[:-2], replace(origin, summed=True))


def gated_by(gate: Any, up: Any, activation: Gate, shape: tuple[int, ...]) -> mx.array | None:
    """activation(gate) * up (*shape) from the product that made both; None if one did not."""
    if not isinstance(gate, Columns) or not isinstance(up, Columns):
        return None
    product, size = gate.origin, shape[-1]
    halves = (gate.start, up.start, gate.array.shape[-1]) == (0, size, 2 * size)
    if not halves or gate.array is not up.array or not isinstance(product, Multiplied):
        return None
    return as_view(product(gate=activation), shape[:-1])


def up_to_date(x: Any) -> Any:
    """The sum that a fused kernel already computed, or x itself."""
    origin = origin_of(x)
    return origin.total if isinstance(origin, Sum) and origin.total is not None else x


def origin_of(x: Any) -> Any:
    return x.origin if type(x) is Traced else None


def as_view(rows: mx.array, shape: tuple[int, ...], origin: Any = None) -> Traced:
    """Rows (N, K) in the model's shape, (*shape, K)."""
    return Traced(rows.reshape(*shape, rows.shape[-1]), origin, rows)


def rows_of(x: mx.array) -> mx.array:
    """x (.., K) as rows (N, K), with no new view if the rows are known: each view is a graph node,
    and building nodes is most of the host's work in a decode step."""
    rows = x.rows if type(x) is Traced else None
    if rows is not None:
        return rows
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
