"""A JSON schema as rules of a grammar, for formats that do not write values as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_metal_lite.chat_formats.schema import merged, named_values, names_of, pointed

SCALARS = "integer", "number", "boolean", "null"


class SchemaRules:
    """The rules of one tool's arguments.

    lines: the grammar of all tools; rules are added as needed.  root: the arguments' schema, an
    object.  base: a format's own lines, which define the rules `any`, `string` and `object`.  A
    subclass defines how its format writes values.
    """

    separator = ","

    def __init__(self, lines: list[str], root: Mapping[str, Any], base: Sequence[str]) -> None:
        self._lines, self._root = lines, root
        self._shared: dict[str, str] = {}  # rules by `$ref`
        if not lines:
            lines += base

    def key(self, name: str) -> str:
        """The key of an object, with what stands after it, as terminals."""
        raise NotImplementedError

    def constant(self, value: Any) -> str:
        """A value of an enumeration, as terminals."""
        raise NotImplementedError

    def scalar(self, schema: Mapping[str, Any]) -> str:
        """A number, a boolean or null."""
        return f"%json {json.dumps(schema)}"

    def arguments(self) -> str:
        """The name of a rule for all arguments."""
        return self._rule({"type": "object", **self._root})

    def pairs(self, schema: Mapping[str, Any], key: Callable[[str], str]) -> str:
        """The name of a rule for the pairs of an object: required ones, and perhaps others."""
        required = names_of(schema.get("required"))
        between = json.dumps(self.separator)
        # Rules for the remaining pairs: if no pair precedes them, and if one does.
        first, later = '""', '""'
        for name in reversed(self.order(schema["properties"])):
            pair = f"{key(name)} {self._rule(schema['properties'][name])}"
            skipped = first, later
            first, later = f"{pair} {later}", f"{between} {pair} {later}"
            if name not in required:
                first, later = f"{first} | {skipped[0]}", f"{later} | {skipped[1]}"
            first, later = self._add(first), self._add(later)
        return first

    def order(self, names: Mapping[str, Any]) -> list[str]:
        """Keys in the order in which the model's templates write them."""
        return list(names)

    def _add(self, text: str) -> str:
        self._lines.append(f"r_{len(self._lines)}: {text}")
        return f"r_{len(self._lines) - 1}"

    def _rule(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return "any"
        schema = merged(schema)
        if isinstance(path := schema.get("$ref"), str):
            return self._referred(path)
        for key in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(key), list) and parts:
                return self._add(" | ".join(self._rule(part) for part in parts))
        if values := named_values(schema):
            return self._add(" | ".join(map(self.constant, values)))
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return self._add(" | ".join(self._rule({**schema, "type": k}) for k in kind))
        if kind == "array":
            item, more = self._rule(schema.get("items")), json.dumps(self.separator)
            return self._add(f'"[" ({item} ({more} {item})*)? "]"')
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return self._add(f'"{{" {self.pairs(schema, self.key)} "}}"')
        if kind in SCALARS:
            return self._add(self.scalar(schema))
        return {"string": "string", "object": "object"}.get(str(kind), "any")

    def _referred(self, path: str) -> str:
        """The rule of a shared part of the schema, which may refer to itself."""
        if path not in self._shared:
            at = len(self._lines)
            self._shared[path] = f"s_{at}"
            self._lines.append("")  # holds the place
            self._lines[at] = f"s_{at}: {self._rule(pointed(self._root, path))}"
        return self._shared[path]
