"""Replaces MLX functions while a packed forward is built.

`mx.fast.scaled_dot_product_attention` with a KVHandle for keys becomes paged attention.  mlx-lm's
modules differ in how they call SDPA, but all use that name.  ScalingAt replaces `x.at` of rotations
that scale their input, which mlx-lm writes as `x.at[..., :dims].multiply(factor)`.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.seam.layer_cache import KVHandle

# Hooks are global to the process, so one thread at a time has some.
_LOCK = threading.RLock()

# (owner, name, around): a call of owner.name becomes around(original, *args, **kwargs).
Hook = tuple[Any, str, Callable]
# The place of a function: the module that holds it, and its name there.
Named = tuple[ModuleType, str]


@contextmanager
def hooked(hooks: Sequence[Hook]) -> Iterator[None]:
    """Install the hooks while the block runs.  Other threads wait to install theirs."""
    with _LOCK:
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in hooks]
        for (owner, name, around), (*_, original) in zip(hooks, originals, strict=True):
            setattr(owner, name, _replacement(original, around))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


def _replacement(original: Any, around: Callable) -> Any:
    if isinstance(original, property):
        return property(partial(around, original.fget))

    def call(*args: Any, **kwargs: Any) -> Any:  # a function, so a class makes it a method
        return around(original, *args, **kwargs)

    return call


def namespaces(model: nn.Module, function: Callable) -> list[ModuleType]:
    """The Python modules that define parts of a model and hold `function` under its own name."""
    return [m for m in modules_of(model) if getattr(m, function.__name__, None) is function]


def modules_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define parts of a model."""
    parts = set(map(type, model.modules()))
    names = {base.__module__ for part in parts for base in part.__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def building(hooks: Sequence[Hook] = ()) -> AbstractContextManager[None]:
    """Held while a packed forward is built.  hooks: the hooks to install beside attention's."""
    return hooked([(mx.fast, "scaled_dot_product_attention", _attend), *hooks])


def _attend(
    original: Callable, q: mx.array, k: mx.array, v: mx.array, *, scale: float, **how: Any
) -> mx.array:
    if not isinstance(k, KVHandle):
        return original(q, k, v, scale=scale, **how)
    return k.cache.attend(q, scale, how.get("mask"), how.get("sinks"))


# A function that takes a product, how many leading elements of its last axis were multiplied, and
# the factor.  The model gets the array that the function returns.
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
    """If a key is [..., :dims]: how many elements of a last axis of `size` it selects.  Else
    None."""
    if not isinstance(key, tuple) or len(key) != 2 or key[0] is not Ellipsis:
        return None
    if not isinstance(key[1], slice):
        return None
    start, stop, step = key[1].indices(size)
    return stop if (start, step) == (0, 1) and stop > 0 else None
