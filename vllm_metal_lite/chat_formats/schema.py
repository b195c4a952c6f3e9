"""Which values a JSON schema allows, for readers and grammars alike."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any
from urllib.parse import unquote

_MOST_RESOLVED = 5000  # a short schema can expand to millions of parts
_OF = "anyOf", "oneOf", "allOf"
# JSON types by Python's; "null" is not among them.
_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
}
Schema = dict[str, Any]


def type_of(value: Any) -> str:
    """The JSON type of a value; "integer" for whole numbers without a fraction."""
    return _TYPES.get(type(value), "null")


def names_of(required: Any) -> list[str]:
    """The keys that an object must have; anything but strings in a list is ignored."""
    if not isinstance(required, list):
        return []
    return [name for name in required if isinstance(name, str)]


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of an object's named values."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def named_values(schema: Mapping[str, Any]) -> list[Any]:
    """The only values that a schema allows (`enum`, `const`, null); empty: it names none."""
    if schema.get("type") == "null":
        return [None]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def values_of(alternatives: Iterable[Schema]) -> list[Any]:
    """The only values that alternatives allow; empty: one of them does not name its values."""
    values = [named_values(schema) for schema in alternatives]
    return list(chain(*values)) if all(values) else []


def types_of(alternatives: Iterable[Schema]) -> set[str]:
    """The JSON types that alternatives allow; empty: any."""
    types: set[str] = set()
    for schema in alternatives:
        if values := named_values(schema):
            types |= set(map(type_of, values))
        elif isinstance(kind := schema.get("type"), str):
            types.add(kind)
        else:
            return set()
    return types


class Resolver:
    """Resolves schemas that refer to parts of `root`, such as those of a tool's arguments."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _MOST_RESOLVED

    def __call__(self, schema: Any) -> list[Schema]:
        """The alternatives of a schema: a value fits one of them.

        At its top level an alternative has no references, `allOf`, `anyOf` and `oneOf`, and at most
        one type.  Parts within arrays and objects stay as they are.  A schema that only refers to
        itself, or stands for too many parts, allows any value: [{}].
        """
        found: list[Schema] = []
        left: list[tuple[Any, frozenset[str]]] = [(schema, frozenset())]
        while left:
            whole, followed = left.pop()
            rest = dict(whole) if isinstance(whole, dict) else {}
            key = next((k for k in _OF if isinstance(rest.get(k), list)), None)
            if isinstance(path := rest.get("$ref"), str):
                del rest["$ref"]
                parts = [{} if path in followed else pointed(self._root, path)]
                followed |= {path}
            elif key is not None:
                parts = rest.pop(key)
            elif isinstance(rest.get("type"), list) and not named_values(rest):
                parts = [{"type": kind} for kind in rest.pop("type")]
            else:
                found.append({"type": "object", **rest} if properties_of(rest) else rest)
                continue
            self._left -= len(parts) * (1 + len(properties_of(rest)))
            if self._left < 0:
                return [{}]
            if key == "allOf" and len(parts) > 1:  # one part at a time
                parts, rest[key] = parts[:1], parts[1:]
            left += [(_combined(rest, part), followed) for part in reversed(parts)]
        return found or [{}]


def _combined(schema: Schema, part: Any) -> Schema:
    """One schema for values that fit both.  Where the two differ, `part` decides."""
    if not isinstance(part, dict):
        return schema
    both = {**schema, **part}
    for key in ("required", "allOf"):
        if isinstance(schema.get(key), list) and isinstance(part.get(key), list):
            both[key] = schema[key] + part[key]
    if properties := {**properties_of(schema), **properties_of(part)}:
        both["properties"] = properties
    return both


def pointed(root: Any, path: str) -> Any:
    """The target of a reference such as "#/$defs/color", or None if this document has no target."""
    if not path.startswith("#"):
        return None
    found = root
    for key in unquote(path).removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal():
            found = found[int(key)] if int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found
