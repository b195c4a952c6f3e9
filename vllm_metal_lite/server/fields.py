"""Reads fields of JSON that no type of pydantic describes: tools, messages, items.

Errors are ApiError (400).  `where` is the place of an object, such as `tools.0`.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from vllm_metal_lite.server.errors import must_be

T = TypeVar("T")

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_DURATION = re.compile(rf"(-?)((?:{_NUMBER}(?:ms|s|m|h))+|{_NUMBER}(?:e[+-]?\d+)?)")


def _idle_seconds(value: Any) -> float | None:
    if value is None:
        return None
    if (match := _DURATION.fullmatch(str(value))) is None:
        why = 'must be seconds, or a duration such as "5m" or "1h30m"'
        raise PydanticCustomError("keep_alive", why)
    sign, text = match[1], match[2]
    parts = re.findall(_NUMBER + "(ms|s|m|h)", text) if text[-1].isalpha() else [(text, "")]
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return math.inf if sign and seconds else seconds


# The type of Ollama's `keep_alive`, in seconds; below 0 means for ever.  As in OLLAMA_KEEP_ALIVE, a
# text without a unit is in seconds.
IdleSeconds = Annotated[
    float | None,
    BeforeValidator(_idle_seconds),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}),
]

_WORDS: dict[type, str] = {str: "a string", dict: "an object", list: "a list"}


def type_of(value: Any) -> str | None:
    """The `type` of an object; None: it has no such string, or the value is no object."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    return kind if isinstance(kind, str) else None


def required_type(value: Any, where: str) -> str:
    if (kind := type_of(value)) is None:
        raise must_be(where, "an object with a type", value)
    return kind


def required_text(fields: Mapping[str, Any], name: str, where: str) -> str:
    """The value of a field that must be a non-empty string."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise must_be(f"{where}.{name}", "a non-empty string", value)
    return value


def optional(fields: Mapping[str, Any], name: str, kind: type[T], where: str) -> T | None:
    """The value of a field that must have a type if it is given; None if it is not."""
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise must_be(f"{where}.{name}", _WORDS[kind], value)
    return value
