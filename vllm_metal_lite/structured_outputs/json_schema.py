"""JSON schemas: their parts, and the changes that llguidance needs."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from decimal import Decimal
from math import isfinite
from typing import Any
from urllib.parse import unquote

from vllm_metal_lite.errors import show

# Keywords whose values are schemas by name, and those whose values are data.  All other words may
# hold schemas, because a `$ref` may point below them.
_BY_NAME = ("$defs", "definitions", "properties", "patternProperties")
_DATA = ("const", "enum", "default", "examples")
# Keywords whose numbers llguidance reads.
_NUMBERS = re.compile(
    "const|enum|multipleOf|(m|exclusiveM)(in|ax)imum|(min|max)(Length|Items|Properties)"
)
# The formats that llguidance follows.  By the standard all others say nothing about the text.
_FORMATS = re.compile("date-time|time|date|duration|email|hostname|ipv4|ipv6|uuid|uri")
# Keywords that llguidance lacks, with values that allow everything.  zod's records have the first.
_SAYS_NOTHING: list[tuple[str, Any]] = [("propertyNames", {"type": "string"})]
_SAYS_NOTHING += [("propertyNames", {}), ("uniqueItems", False)]
# llguidance carries numbers as floats, and reads longer ones wrongly.
_MOST_INTEGER, _MOST_DIGITS, _MOST_EXPONENT = 2**53 - 1, 15, 22
Change = Callable[[dict[str, Any], str], dict[str, Any]]


class SchemaError(ValueError):
    """A schema that cannot be enforced.  place: where in the schema, as ".properties.age"."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(why)
        self.place = place


def _parts(schema: dict[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    """The parts of a schema: the holder of each, its key and its place."""
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            yield from ((value, name, f".{key}.{name}") for name in value)
        elif isinstance(value, list) and key not in _DATA:
            yield from ((value, i, f".{key}.{i}") for i in range(len(value)))
        elif key not in _DATA:
            yield schema, key, f".{key}"


def rebuilt(schema: Any, change: Change, place: str = "") -> Any:
    """The schema with each of its parts, and then itself, replaced by change(part, place)."""
    if not isinstance(schema, dict):
        return schema
    new = {k: v.copy() if isinstance(v, dict | list) else v for k, v in schema.items()}
    for holder, key, at in _parts(new):
        holder[key] = rebuilt(holder[key], change, place + at)
    return change(new, place)


def pointed(root: Any, path: str) -> Any:
    """The target of a reference such as "#/$defs/color", or None if this document has no target."""
    start, *keys = unquote(path).split("/")
    found = root if start == "#" else None
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal():
            found = found[int(key)] if int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


def prepared(schema: Any) -> Any:
    """The schema for llguidance, without formats that llguidance does not know.  Raises SchemaError
    for numbers that llguidance cannot represent exactly, and for schemas without a finite value."""
    _check_ends(schema)
    return rebuilt(schema, _prepare)


def _check_ends(root: Any) -> None:
    """Raise SchemaError for a reference that requires itself: an answer would never end."""
    places: dict[str, str] = {}
    waiting: dict[str, list[str]] = {}  # reference -> references that need it

    def find(part: dict[str, Any], place: str) -> dict[str, Any]:
        if isinstance(path := part.get("$ref"), str):
            places.setdefault(path, place)
        return part

    rebuilt(root, find)
    left, endless = list(places), set(places)
    while left:
        path = left.pop()
        try:
            needed = _needed(pointed(root, path), endless)
        except (AttributeError, TypeError, ValueError):  # no schema, as llguidance will say
            needed = set()
        for other in needed:
            waiting.setdefault(other, []).append(path)
        if not needed and path in endless:
            endless.remove(path)
            left += waiting.pop(path, ())
    if endless:
        path = next(path for path in places if path in endless)
        raise SchemaError(places[path], f"no text fits: {show(path)} requires itself")


def _needed(schema: Any, endless: Set[str]) -> set[str]:
    """The references that every finite value of a schema needs; empty: some value needs none."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return set()
    if isinstance(path := schema.get("$ref"), str) and path in endless:
        return {path}
    parts = list(schema.get("allOf", ()))
    kind, properties = schema.get("type"), schema.get("properties", {})
    if kind in ("object", ["object"]) or (kind is None and properties):
        other = schema.get("additionalProperties")
        parts += [properties.get(name, other) for name in schema.get("required", ())]
    elif kind in ("array", ["array"]):
        items = [*schema.get("prefixItems", ()), schema.get("items")]
        parts += items[: int(schema.get("minItems", 0))]
    needed = set().union(*(_needed(part, endless) for part in parts))
    for key in ("anyOf", "oneOf"):
        if options := [_needed(part, endless) for part in schema.get(key, ())]:
            needed |= set().union(*options) if all(options) else set()
    return needed


def closed(schema: Any) -> Any:
    """The schema with objects that allow only their named properties."""

    def close(part: dict[str, Any], place: str) -> dict[str, Any]:
        named = isinstance(part.get("properties"), dict)
        return {"additionalProperties": False, **part} if named else part

    return rebuilt(schema, close)


def _prepare(part: dict[str, Any], place: str) -> dict[str, Any]:
    without = "default", "examples"
    kept = {k: v for k, v in part.items() if k not in without and (k, v) not in _SAYS_NOTHING}
    for name, most in (("maximum", _MOST_INTEGER), ("minimum", -_MOST_INTEGER)):
        _narrow(kept, name, most)
    new = {k: _exact(v, f"{place}.{k}") if _NUMBERS.fullmatch(k) else v for k, v in kept.items()}
    if isinstance(form := new.get("format"), str) and not _FORMATS.fullmatch(form):
        del new["format"]
    return new


def without_numbers(schema: Any) -> Any:
    """The schema with small numbers in `enum` and `const`, for formats that write such values as
    their own text: llguidance need not represent the real ones."""

    def change(part: dict[str, Any], place: str) -> dict[str, Any]:
        return part | {key: _small(part[key]) for key in ("enum", "const") if key in part}

    return rebuilt(schema, change)


def _small(value: Any) -> Any:
    if isinstance(value, list):
        return [_small(v) for v in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(max(-9, min(9, value))) if is_number and isfinite(value) else value


def _narrow(part: dict[str, Any], name: str, most: int) -> None:
    """Replace a limit beyond `most`, such as that of int64, by `most`: a stricter schema."""
    sign = 1 if most > 0 else -1
    for limit in (name, f"exclusive{name.capitalize()}"):
        value = part.get(limit)
        if isinstance(value, int | float) and value * sign > most * sign:
            del part[limit]
            part.setdefault(name, most)


def _exact(value: Any, place: str) -> Any:
    """The value, if llguidance represents its numbers exactly; else SchemaError."""
    if isinstance(value, dict):
        return {k: _exact(v, f"{place}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [_exact(v, f"{place}.{i}") for i, v in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, int) or value.is_integer():
        if abs(value) <= _MOST_INTEGER:
            return int(value)
    elif isfinite(value):
        number = Decimal(repr(value)).as_tuple()
        digits = "".join(map(str, number.digits)).rstrip("0")
        exponent = int(number.exponent) + len(number.digits) - len(digits)
        if len(digits) <= _MOST_DIGITS and exponent >= -_MOST_EXPONENT:
            return float(value)
    raise SchemaError(
        place,
        f"{show(value)} cannot be kept exactly: numbers have at most {_MOST_DIGITS} digits "
        f"and {_MOST_EXPONENT} decimal places, integers are at most {_MOST_INTEGER}",
    )


def locate(schema: dict[str, Any], error_of: Callable[[Any], str | None]) -> str:
    """The place of the smallest part of a schema with the same error as the whole, such as
    ".properties.age"; "" for the whole.  llguidance's errors do not always name a place.

    error_of: returns the error of a schema, or None.
    """
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    part, path, error = schema, "", error_of(schema)
    while True:
        for holder, key, place in _parts(part):
            if not isinstance(child := holder[key], dict):
                continue
            alone = {**shared, **child} if "$ref" in str(child) else child
            if error_of(alone) == error:
                part, path = child, path + place
                break
        else:
            return path
