"""References within a tool's JSON schema: `$ref`, as JSON pointers (RFC 6901) into the schema."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from vllm_metal_lite.structured_outputs.json_schema import rebuilt

# Where `standalone` keeps the whole schema.
_WHOLE = "arguments"
_MOST_RESOLVED = 1000


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


def names_of(required: Any) -> list[str]:
    """The keys that an object must have; anything but strings in a list is ignored."""
    if not isinstance(required, list):
        return []
    return [name for name in required if isinstance(name, str)]


def named_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows (`enum`, `const`); None: it names none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


def merged(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with an `allOf` of one part merged into it."""
    parts = schema.get("allOf")
    if not (isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict)):
        return schema
    return merged({**parts[0], **{k: v for k, v in schema.items() if k != "allOf"}})


class Resolver:
    """Resolves the schema of a parameter, so that its top level says which values are allowed.

    Replaces references, and an `allOf` with one part, at the top level and in alternatives, but not
    inside arrays and objects.  A schema that only refers to itself allows any value.  After
    _MOST_RESOLVED parts references stay, because a short schema can expand to millions.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _MOST_RESOLVED

    def __call__(self, schema: Any, following: frozenset[str] = frozenset()) -> Any:
        if not isinstance(schema, dict):
            return schema
        if isinstance(path := schema.get("$ref"), str):
            rest = {k: v for k, v in schema.items() if k != "$ref"}
            found = {} if path in following else pointed(self._root, path)
            self._left -= 1
            if not isinstance(found, dict) or self._left < 0:
                return schema
            return self({**found, **rest}, following | {path})
        if (whole := merged(schema)) is not schema:
            return self(whole, following)
        for key in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(key), list):
                self._left -= len(parts)
                if self._left >= 0:
                    schema = {**schema, key: [self(part, following) for part in parts]}
        return schema


def standalone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of `root` as a schema of its own, with all that the part refers to."""
    moved = _moved(schema)
    if moved == schema:
        return moved
    return {**moved, "$defs": {_WHOLE: _moved(root)}}


def _moved(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, its references changed to `#/$defs/arguments/...`."""

    def move(part: dict[str, Any], place: str) -> dict[str, Any]:
        path = part.get("$ref")
        if isinstance(path, str) and path.startswith("#"):
            part["$ref"] = f"#/$defs/{_WHOLE}{path[1:]}"
        return part

    moved: dict[str, Any] = rebuilt(schema, move)
    return moved
