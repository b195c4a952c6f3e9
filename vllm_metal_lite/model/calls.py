"""Changes or observes calls of single modules; other modules of the same class stay as they are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal_lite.backend import mx


def wrap_call(module: nn.Module, around: Callable[..., Any]) -> None:
    """Replace the module's `__call__` by around(call, *args, **kwargs); `call` is the original.

    The module gets a class of its own: Python looks up __call__ in the class.
    """
    base = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(partial(base.__call__, self), *args, **kwargs)

    module.__class__ = type(base.__name__, (base,), {"__call__": call})


def unwrap_call(module: nn.Module) -> None:
    """Undo the newest wrap_call of a module."""
    module.__class__ = type(module).__bases__[0]


@contextmanager
def observing(modules: Sequence[nn.Module], around: Callable[..., Any]) -> Iterator[None]:
    """Within the context, around(module, call, *args, **kwargs) replaces the modules' calls."""
    for module in modules:
        wrap_call(module, partial(around, module))
    try:
        yield
    finally:
        for module in modules:
            unwrap_call(module)


def calls_of(model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[nn.Module, Any, Any]]:
    """(module, first argument, result) of the modules' calls, in order, while the model runs one
    token natively.  Nothing is evaluated."""
    calls: list[tuple[nn.Module, Any, Any]] = []

    def noting(
        module: nn.Module, call: Callable[..., Any], x: Any, *args: Any, **kwargs: Any
    ) -> Any:
        y = call(x, *args, **kwargs)
        calls.append((module, x, y))
        return y

    with observing(modules, noting):
        model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    return calls
