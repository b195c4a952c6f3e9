"""How long a model's context is."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeGuard

import mlx.nn as nn

from vllm_metal_lite.model.adapters.modules import rotation_limit

_KEYS = (
    "max_position_embeddings", "max_seq_len", "n_positions", "seq_length", "n_ctx",
    "model_max_length",
)  # fmt: skip
_DEFAULT = 8192


def context_length(model: nn.Module, config: dict[str, Any]) -> tuple[int, str | None]:
    """The longest context in tokens, and where the number comes from if it is a guess.

    config.json says it, or else mlx-lm's ModelArgs have a default.  A rotation that changes behind
    the trained context is a limit in any case.
    """
    limit = rotation_limit(model)
    if limit is not None:
        return limit, None
    for scope in (config, config.get("text_config") or {}):
        for value in map(scope.get, _KEYS):
            if _is_length(value):
                return value, None
    for args in _model_args(model):
        for field in dataclasses.fields(args):
            value = getattr(args, field.name, None)
            if field.name in _KEYS and _is_length(value):
                return value, "the default of mlx-lm" if value == field.default else None
    return _DEFAULT, "a usual length"


def _is_length(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def _model_args(model: nn.Module) -> Iterator[Any]:
    """What mlx-lm made the parts of a model from, the outermost first: a nested part's are made
    from a nested configuration, whatever the name of that."""
    for _, module in model.named_modules():
        for value in vars(module).values():
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                yield value
