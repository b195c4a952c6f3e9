"""Packed rows that are columns of a wider array, which kernels read in place of a copy."""

from collections.abc import Callable
from functools import wraps
from types import EllipsisType
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns

# Operations that change an array in place.
_ARITHMETIC = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul")
_IN_PLACE = ("setitem", *_ARITHMETIC, "iand", "ior", "ixor", "ilshift", "irshift")
_assign = mx.array.__setitem__


class ColumnsOf(mx.array):
    """Rows (N, 1, ...) that remember their origin: Columns, or one that fusion/traced.py knows.

    Views of whole rows know their columns too.  origin: None once the rows were changed in place.
    """

    def __init__(self, value: mx.array, origin: Any) -> None:
        super().__init__(value)
        # The constructor copies: a graph node, and a launch if `value` has other users.
        self.set_value(value)
        self.origin = origin

    def set_value(self, value: mx.array) -> None:
        """Change the value; the origin stays."""
        _assign(self, slice(None), value)

    def forget(self) -> None:
        """Drop the origin: the value is another one now."""
        self.origin = None

    @property
    def columns(self) -> Columns | None:
        """The columns of these rows, if known."""
        return self.origin if isinstance(self.origin, Columns) else None

    def reshape(self, *shape: Any, **kwargs: Any) -> mx.array:
        value, columns = super().reshape(*shape, **kwargs), self.columns
        if columns is None or value.shape[:2] != self.shape[:2]:
            return value
        return ColumnsOf(value, columns)

    def __getitem__(self, index: Any) -> mx.array:
        value, columns = super().__getitem__(index), self.columns
        match index:
            case (EllipsisType(), slice(step=None | 1) as last) if columns and self.ndim == 3:
                start, _, _ = last.indices(self.shape[-1])
                return ColumnsOf(value, columns._replace(start=columns.start + start))
        return value


def _forgetting(name: str) -> Callable:
    original = getattr(mx.array, name)

    @wraps(original)
    def method(self: ColumnsOf, *args: Any) -> Any:
        self.forget()
        return original(self, *args)

    return method


for _name in _IN_PLACE:
    setattr(ColumnsOf, f"__{_name}__", _forgetting(f"__{_name}__"))


def columns_of(rows: mx.array) -> Columns:
    """The array and column from which rows (N, 1, ...) come; if unknown, the rows themselves, from
    column 0."""
    known = getattr(rows, "columns", None)
    return known or Columns(rows.reshape(len(rows), -1), 0)
