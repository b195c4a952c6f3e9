"""Compiled functions of a model that choose experts."""

from types import FunctionType, ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.routing import Choice
from vllm_metal_lite.fusion.traced import as_view, origin_of, rows_of
from vllm_metal_lite.model.seam.hooks import modules_of

_COMPILED = type(mx.compile(lambda: None))

# A module of a model, and the name of a compiled function in it.
Selector = tuple[ModuleType, str]


def selectors_of(model: nn.Module) -> tuple[Selector, ...]:
    """The compiled functions in a model's modules that sort, as those that choose experts do."""
    return tuple(
        (module, name)
        for module in modules_of(model)
        for name, function in vars(module).items()
        if type(function) is _COMPILED and "argpartition" in function.__code__.co_names
    )


def uncompiled(original: Any, logits: mx.array, *args: Any, **kwargs: Any) -> Any:
    """The result of `original`.  Runs its Python code, because compiled code keeps no origins; if
    the code chooses no experts, runs `original` itself."""
    code, names, defaults = original.__code__, original.__globals__, original.__defaults__
    plain = FunctionType(code, names, original.__name__, defaults, original.__closure__)
    plain.__kwdefaults__ = original.__kwdefaults__
    result = plain(as_view(rows_of(logits), logits.shape[:-1]), *args, **kwargs)
    chosen = isinstance(result, tuple) and any(isinstance(origin_of(r), Choice) for r in result)
    return result if chosen else original(logits, *args, **kwargs)
