"""Rotations that scale their input, as mlx-lm writes them: `x.at[..., :dims].multiply(factor)`."""

from collections.abc import Callable
from typing import Any

from vllm_metal_lite.backend import mx

# The product, the leading elements of the last axis that were multiplied, the factor -> the result.
Noted = Callable[[mx.array, int, float], mx.array]


class ScalingAt:
    """`x.at`, which calls `noted` when leading elements are multiplied by a float."""

    def __init__(self, x: mx.array, at: Any, noted: Noted) -> None:
        self._size, self._at, self._noted = x.shape[-1], at, noted

    def __getitem__(self, key: Any) -> Any:
        updates, dims = self._at[key], leading(key, self._size)
        return updates if dims is None else _Leading(updates, dims, self._noted)


class _Leading:
    """The updates of leading elements."""

    def __init__(self, updates: Any, dims: int, noted: Noted) -> None:
        self._updates, self._dims, self._noted = updates, dims, noted

    def multiply(self, factor: Any) -> mx.array:
        value = self._updates.multiply(factor)
        return self._noted(value, self._dims, factor) if isinstance(factor, float) else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updates, name)


def leading(key: Any, size: int) -> int | None:
    """The elements of a last axis of `size` that the key [..., :dims] selects, else None."""
    if not isinstance(key, tuple) or len(key) != 2 or key[0] is not Ellipsis:
        return None
    if not isinstance(key[1], slice):
        return None
    start, stop, step = key[1].indices(size)
    return stop if (start, step) == (0, 1) and stop > 0 else None
