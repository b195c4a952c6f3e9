"""Arrays that remember their origin.

    q = q_proj(x)       a Traced: its value is MLX's product, which MLX has not computed yet;
                        its origin is a Product, by which a rule can ask for more than the product
    q = mx.exp(q)       an mx.array: no rule knows this operation, so the origin is lost

The rules are in rule_table.py.  A change in place drops the origin, too (tracked_columns.py).
"""

from collections.abc import Callable
from typing import Any

from vllm_metal_lite.attention.pending_heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.model.seam.layer_cache import RotaryKeys
from vllm_metal_lite.recurrence.tracked_columns import ColumnsOf

# An operation of MLX, a function of a model, or a rule.
Function = Callable[..., Any]


class Traced(ColumnsOf):
    """An array that a model uses as any other.

    origin: the inputs from which a larger launch can compute this array, or also the operation
    after it; None if unknown.
    rows: (N, K), if the array is a view of them as (.., K).  Models use the view, kernels the rows.
    """

    def __init__(self, value: mx.array, origin: Any, rows: mx.array | None = None) -> None:
        super().__init__(value, origin)
        self.rows = rows

    def become(self, other: "Traced") -> None:
        """Take the value and the origin of `other`: the same array from a larger launch
        (rule_table.py), or this array after a change in place."""
        self.set_value(other)
        self.origin, self.rows = other.origin, other.rows

    def forget(self) -> None:
        self.origin = self.rows = None

    @property
    def columns(self) -> Columns | None:
        return self.origin.plain if isinstance(self.origin, Heads) else super().columns

    def __matmul__(self, other: Any) -> mx.array:
        # Python asks this class first, and MLX's product does not know RotaryKeys.
        if isinstance(other, RotaryKeys):
            return other.__rmatmul__(self)
        if isinstance(other, mx.array) and (self.ndim, other.ndim) == (3, 2):
            return as_view(rows_of(self) @ other, self.shape[:-1])
        return super().__matmul__(other)

    def __itruediv__(self, other: Any) -> mx.array:  # type: ignore[misc]
        quotient = self / other
        if type(quotient) is not Traced:
            return super().__itruediv__(other)
        self.become(quotient)
        return self


def origin_of(x: Any) -> Any:
    return x.origin if type(x) is Traced else None


def as_view(rows: mx.array, shape: tuple[int, ...], origin: Any = None) -> Traced:
    """Rows (N, K) in the model's shape, (*shape, K)."""
    return Traced(rows.reshape(*shape, rows.shape[-1]), origin, rows)


def rows_of(x: mx.array) -> mx.array:
    """x (.., K) as rows (N, K), with no new view if the rows are known: each view is a graph node,
    and building nodes is most of the host's work in a decode step."""
    if type(x) is Traced and x.rows is not None:
        return x.rows
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
