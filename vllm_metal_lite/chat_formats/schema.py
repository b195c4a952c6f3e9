"""Which values a JSON schema allows, for readers and grammars alike."""

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from vllm_metal_lite.errors import show
from vllm_metal_lite.structured_outputs.json_schema import SchemaError, pointed, rebuilt

_MOST_RESOLVED = 5000  # a short schema can expand to millions of parts
_OF = "anyOf", "oneOf", "allOf"
NUMBERS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"
_NAMES = "properties", "required", "additionalProperties", "patternProperties"
# Keywords that limit values, by the values' type.  llguidance refuses those that are not here.
_LIMITS = {
    "string": ("minLength", "maxLength", "pattern"),
    "array": ("minItems", "maxItems", "prefixItems", "items", "additionalItems"),
    "object": (*_NAMES, "minProperties", "maxProperties"),
    "number": NUMBERS,
    "integer": NUMBERS,
}
_ALL_LIMITS = frozenset(chain(_OF, *_LIMITS.values()))
# Marks a schema that was combined from two parts, if both had a keyword and one value was dropped.
_DROPPED = "part of allOf"
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
    """The list under a keyword such as `required`; [] if there is no list."""
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


def bare_text(value: Any) -> str:
    """A value as text: a string without quotes, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def values_of(alternatives: Iterable[Schema]) -> list[Any]:
    """All values that the alternatives allow; empty if one of them does not name its values."""
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


def unheld(schema: Mapping[str, Any], *held: str) -> str:
    """A keyword that limits the values of an alternative and is not in `held`; "": none."""
    kind = None if named_values(schema) else schema.get("type")
    keys = _ALL_LIMITS if kind is None else _LIMITS.get(str(kind), ())
    return schema.get(_DROPPED) or next((k for k in keys if k in schema and k not in held), "")


class Resolver:
    """Resolves schemas that refer to parts of `root`, such as those of a tool's arguments."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _MOST_RESOLVED

    def __call__(self, schema: Any) -> list[Schema]:
        """The alternatives of a schema: a value fits one of them.

        At its top level an alternative has no references, `allOf`, `anyOf` and `oneOf`, and at most
        one type.  Parts within arrays and objects stay as they are.  A schema that only refers to
        itself, or represents too many parts, allows any value: [{}].  A schema that allows no value
        has no alternatives.
        """
        found: list[Schema] = []
        is_loop = False
        left: list[tuple[Any, frozenset[str]]] = [(schema, frozenset())]
        while left:
            whole, followed = left.pop()
            if whole is False:
                continue
            rest = dict(whole) if isinstance(whole, dict) else {}
            key = next((k for k in _OF if listed(rest, k)), None)
            if isinstance(path := rest.get("$ref"), str):
                del rest["$ref"]
                if path in followed:  # adds nothing to the other alternatives
                    is_loop = True
                    continue
                parts = [pointed(self._root, path)]
                followed |= {path}
            elif key is not None:
                parts = rest.pop(key)
            elif listed(rest, "type") and not named_values(rest):
                parts = [{"type": kind} for kind in rest.pop("type")]
            else:
                found += _possible(rest)
                continue
            self._left -= len(parts) * (1 + len(properties_of(rest)))
            self._left -= sum(len(properties_of(p)) for p in parts if isinstance(p, dict))
            if self._left < 0:
                return [{_DROPPED: "$ref"}]
            if key == "allOf" and len(parts) > 1:  # one part at a time
                parts, rest[key] = parts[:1], parts[1:]
            left += [(_combined(rest, part), followed) for part in reversed(parts)]
        return found or [{}] * is_loop

    def check(self) -> None:
        """Raise SchemaError for a reference that is not followed: any value fits it."""

        def find(part: Schema, place: str) -> Schema:
            path = part.get("$ref")
            if isinstance(path, str) and pointed(self._root, path) is None:
                raise SchemaError(f"{place}.$ref", f"{show(path)} is no path from the root")
            return part

        rebuilt(self._root, find)

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


def _possible(schema: Schema) -> list[Schema]:
    """The schema, reduced to the named values that have its type, with a schema for each required
    property; [] if no value is left."""
    if values := named_values(schema):
        kept = [v for v in values if _is_a(v, schema.get("type"))]
        return [schema if kept == values else {**schema, "enum": kept}] if kept else []
    properties = properties_of(schema)
    if properties or schema.get("type") == "object":
        other = schema.get("additionalProperties", {})
        required = (name for name in listed(schema, "required") if isinstance(name, str))
        missing = {name: other for name in required if name not in properties}
        if properties or missing:
            return [{"type": "object", **schema, "properties": {**properties, **missing}}]
    return [schema]


def _is_a(value: Any, kinds: Any) -> bool:
    """Whether a value has one of the types that a schema names; None: any."""
    kind = JSON_TYPES[type(value)]
    if kind == "number" and value == value // 1:
        kind = "integer"
    return kinds is None or _has([kinds] if isinstance(kinds, str) else kinds, kind)


def _combined(schema: Schema, part: Any) -> Any:
    """One schema for values that fit both; False if no value does.

    If both have an annotation, or a keyword that cannot be combined (`_DROPPED`), the one of `part`
    stays.
    """
    if not isinstance(part, dict):
        return part is not False and schema
    both = {**schema, **part}
    for key in schema.keys() & part.keys():
        one, other = schema[key], part[key]
        if one == other or key == "properties":
            continue
        if key in ("required", "allOf"):
            both[key] = listed(schema, key) + listed(part, key)
        elif key == "type":
            one, other = ([k] if isinstance(k, str) else k for k in (one, other))
            both[key] = [k for k in JSON_TYPES.values() if _has(one, k) and _has(other, k)]
            if not both[key]:
                return False
        elif key in ("items", "additionalProperties"):
            both[key] = _all_of(one, other)
        elif key in _ALL_LIMITS:
            both[_DROPPED] = key
    if (values := named_values(schema)) and (others := named_values(part)):
        texts = set(map(json.dumps, others))
        both["enum"] = [v for v in values if json.dumps(v) in texts]
        both.pop("const", None)
        if not both["enum"]:
            return False
    if names := {**properties_of(schema), **properties_of(part)}:
        both["properties"] = {n: _all_of(_named(schema, n), _named(part, n)) for n in names}
    return both


def _has(kinds: list[str], kind: str) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _named(schema: Schema, name: str) -> Any:
    """The schema of a property, perhaps one that `properties` does not name."""
    return properties_of(schema).get(name, schema.get("additionalProperties", True))


def _all_of(one: Any, other: Any) -> Any:
    if one is True or one == other:
        return other
    return one if other is True else {"allOf": [one, other]}
