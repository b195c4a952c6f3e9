"""Arrays that remember how they came to be, so that several launches can become one.

A `Traced` array has its value like any other.  MLX is lazy, so a value that nobody uses is never
computed.  A fused kernel (for a projection's columns, then a norm, then RoPE, then the store; or
for a norm, then a product, then a sum) starts from the recorded origin, so MLX never computes the
intermediate.  No architecture is known by name, and an operation that does not fit is not fused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from vllm_metal_lite.attention.heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.skinny_gemm import RowNorm, skinny_gemm


def heads_of(x: mx.array) -> Heads:
    """What x (N, num_heads, 1, head_dim) comes from; x itself where that is not known."""
    origin = origin_of(x)
    if isinstance(origin, Heads):
        return origin
    rows, heads, _, dim = x.shape
    return Heads(Columns(x.reshape(rows, heads * dim), 0), heads, dim)


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention's output, as it lies in memory: rows (N, num_heads, head_dim)."""

    rows: mx.array


@dataclass(frozen=True, slots=True)
class Normed:
    """Rows (N, K) after an RMS norm; norm None: as they are."""

    rows: mx.array
    norm: RowNorm | None


@dataclass(frozen=True, slots=True)
class Multiplied:
    """What `skinny_gemm` makes of normed rows and a weight (outputs, K)."""

    x: Normed
    weight: mx.array

    def __call__(self, residual: mx.array | None = None, swiglu: bool = False) -> mx.array:
        """The product (N, outputs), with what follows it."""
        return skinny_gemm(
            self.x.rows, self.weight, norm=self.x.norm, residual=residual, swiglu=swiglu
        )


@dataclass(slots=True)
class Sum:
    """x + y.  total: their sum, if a kernel computed it on its way to something else."""

    x: mx.array
    y: mx.array
    total: mx.array | None = None


_assign = mx.array.__setitem__


class Traced(mx.array):
    """An array and its origin: Columns (of a product), Heads, Attended, Normed, Multiplied,
    Sum or None.

    Heads of packed rows, and what they attended to, are (N, 1, num_heads, head_dim) or (N,
    num_heads, 1, head_dim), which is the same in memory.
    rows: (N, K), if the array is a view of them as (.., K): models want the one, kernels the other.
    """

    def __init__(self, value: mx.array, origin: Any, rows: mx.array | None = None) -> None:
        super().__init__(value)
        # Of an array MLX makes a copy: a node, and where others look at it too, a launch.
        _assign(self, slice(None), value)
        self.origin, self.rows = origin, rows

    def reshape(self, *shape: Any, **kwargs: Any) -> mx.array:
        value, origin = super().reshape(*shape, **kwargs), self.origin
        if isinstance(origin, Columns) and value.ndim == 4 and value.shape[:2] == (len(self), 1):
            return Traced(value, Heads(origin, value.shape[2], value.shape[3]))
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

    def __add__(self, other: Any) -> mx.array:
        return _add(self, other)

    def __radd__(self, other: Any) -> mx.array:
        return _add(other, self)


def _add(x: Any, y: Any) -> mx.array:
    x, y = up_to_date(x), up_to_date(y)
    value = mx.add(x, y)
    arrays = isinstance(x, mx.array) and isinstance(y, mx.array)
    if arrays and x.shape == y.shape and x.dtype == y.dtype and value.ndim == 3:
        return Traced(value, Sum(x, y))
    return value


def up_to_date(x: Any) -> Any:
    """The sum that a kernel has computed, in the place of one that would be computed again."""
    origin = origin_of(x)
    return origin.total if isinstance(origin, Sum) and origin.total is not None else x


def origin_of(x: Any) -> Any:
    return x.origin if type(x) is Traced else None


def as_view(rows: mx.array, shape: tuple[int, ...], origin: Any = None) -> Traced:
    """Rows (N, K) as a model wants them, (*shape, K)."""
    return Traced(rows.reshape(*shape, rows.shape[-1]), origin, rows)


def rows_of(x: mx.array) -> mx.array:
    """x (.., K) as rows (N, K), without a new view where they are known: each view is a node of the
    graph, and building nodes is most of the host's work in a decode step."""
    rows = x.rows if type(x) is Traced else None
    if rows is not None:
        return rows
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _forgetting(name: str) -> Callable:
    original = getattr(mx.array, name)

    @wraps(original)
    def method(self: Traced, *args: Any) -> Any:
        self.origin = self.rows = None
        return original(self, *args)

    return method


# What changes an array in place, as MLX spells it, leaves nothing to remember.
for _name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul",
              "iand", "ior", "ixor", "ilshift", "irshift"):  # fmt: skip
    setattr(Traced, f"__{_name}__", _forgetting(f"__{_name}__"))
