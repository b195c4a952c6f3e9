"""Which values a JSON schema allows, for readers and grammars alike."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any
from urllib.parse import unquote

from vllm_metal_lite.structured_outputs.json_schema import rebuilt

_MOST_RESOLVED = 5000  # a short schema can expand to millions of parts
_OF = "anyOf", "oneOf", "allOf"
JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
Schema = dict[str, Any]


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list of a keyword such as `required`; anything else is ignored."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of an object's named values."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def named_values(schema: Mapping[str, Any]) -> list[Any]:
    """The only values that a schema allows (`enum`, `const`, null); empty: it names none."""
    if schema.get("type") == "null":
        return [None]
    return listed(schema, "enum") or ([schema["const"]] if "const" in schema else [])


def values_of(alternatives: Iterable[Schema]) -> list[Any]:
    """The only values that alternatives allow; empty: one of them does not name its values."""
    values = [named_values(schema) for schema in alternatives]
    return list(chain(*values)) if all(values) else []


def types_of(alternatives: Iterable[Schema]) -> set[str]:
    """The JSON types that alternatives allow; empty: any."""
    types: set[str] = set()
    for schema in alternatives:
        if values := named_values(schema):
            types |= {JSON_TYPES[type(value)] for value in values}
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
        itself, or represents too many parts, allows any value: [{}].
        """
        found: list[Schema] = []
        left: list[tuple[Any, frozenset[str]]] = [(schema, frozenset())]
        while left:
            whole, followed = left.pop()
            rest = dict(whole) if isinstance(whole, dict) else {}
            key = next((k for k in _OF if listed(rest, k)), None)
            if isinstance(path := rest.get("$ref"), str):
                del rest["$ref"]
                parts = [{} if path in followed else pointed(self._root, path)]
                followed |= {path}
            elif key is not None:
                parts = rest.pop(key)
            elif listed(rest, "type") and not named_values(rest):
                parts = [{"type": kind} for kind in rest.pop("type")]
            else:
                found.append({"type": "object", **rest} if properties_of(rest) else rest)
                continue
            self._left -= len(parts) * (1 + len(properties_of(rest)))
            self._left -= sum(len(properties_of(p)) for p in parts if isinstance(p, dict))
            if self._left < 0:
                return [{}]
            if key == "allOf" and len(parts) > 1:  # one part at a time
                parts, rest[key] = parts[:1], parts[1:]
            left += [(_combined(rest, part), followed) for part in reversed(parts)]
        return found

    def standalone(self, schema: Mapping[str, Any]) -> Schema:
        """A part of `root` as a schema of its own, with all that the part refers to."""
        names: dict[str, str] = {}  # by the path in `root`
        waiting: list[str] = []

        def move(part: Schema, place: str) -> Schema:
            path = part.get("$ref")
            if isinstance(path, str) and path.startswith("#"):
                if path not in names:
                    names[path] = f"part_{len(names)}"
                    waiting.append(path)
                part["$ref"] = f"#/$defs/{names[path]}"
            return part

        moved: Schema = rebuilt(schema, move)
        # `move` adds to `waiting`, because parts may refer to further parts.
        parts = {names[path]: rebuilt(pointed(self._root, path), move) for path in waiting}
        return {**moved, "$defs": parts} if parts else moved


def _combined(schema: Schema, part: Any) -> Schema:
    """One schema for values that fit both.  Where the two differ, `part` decides."""
    if not isinstance(part, dict):
        return schema
    both = {**schema, **part}
    for key in ("required", "allOf"):
        if found := listed(schema, key) + listed(part, key):
            both[key] = found
    if properties := {**properties_of(schema), **properties_of(part)}:
        both["properties"] = properties
    return both


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
