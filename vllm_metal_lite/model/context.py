"""The context length of a model."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeGuard

import mlx.nn as nn

from vllm_metal_lite.model.adapters import rotation_limit

_KEYS = (
    "max_position_embeddings",
    "max_seq_len",
    "n_positions",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_DEFAULT = 8192


def context_length(model: nn.Module, config: dict[str, Any]) -> tuple[int, str | None]:
    """The longest context in tokens, and the source of that number if it is a guess.

    The number comes from config.json, or else from mlx-lm's ModelArgs.  A linear rotation's factor
    does not multiply the number, because Gemma 3's and others include the factor.  A rotation that
    changes beyond the trained context takes precedence as the limit.
    """
    limit = rotation_limit(model)
    if limit is not None:
        return limit, None
    if (length := configured_length(config)) is not None:
        return length, None
    for args in _model_args(model):
        for field in dataclasses.fields(args):
            value = getattr(args, field.name, None)
            if field.name in _KEYS and _is_length(value):
                return value, "the default of mlx-lm" if value == field.default else None
    return _DEFAULT, "a usual length"


def configured_length(config: dict[str, Any]) -> int | None:
    """The longest context that config.json names."""
    for scope in (config, config.get("text_config")):
        for value in map(scope.get, _KEYS) if isinstance(scope, dict) else ():
            if _is_length(value):
                return value
    return None


def _is_length(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def _model_args(model: nn.Module) -> Iterator[Any]:
    """The ModelArgs of a model's parts, outermost first.  A nested part has its own, from a nested
    configuration of any name."""
    for module in model.modules():
        for value in vars(module).values():
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                yield value
