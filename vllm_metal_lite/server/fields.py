"""Reads fields of JSON that no type of pydantic describes: tools, messages, items.

Errors are ApiError (400).  `where` is the place of an object, such as `tools.0`.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from vllm_metal_lite.server.errors import must_be

T = TypeVar("T")

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
