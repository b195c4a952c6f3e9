"""Replaces MLX functions while a packed forward is built.

`mx.fast.scaled_dot_product_attention` with a KVHandle for keys becomes paged attention.  mlx-lm's
modules differ in how they call SDPA, but all use that name.
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
# A function: a module that holds it, and its name there.
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
    """Held while a packed forward is built.  hooks: those beside attention's."""
    return hooked([(mx.fast, "scaled_dot_product_attention", _attend), *hooks])


def _attend(
    original: Callable, q: mx.array, k: mx.array, v: mx.array, *, scale: float, **how: Any
) -> mx.array:
    if not isinstance(k, KVHandle):
        return original(q, k, v, scale=scale, **how)
    return k.cache.attend(q, scale, how.get("mask"), how.get("sinks"))
