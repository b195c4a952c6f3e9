"""A JSON schema as rules of a grammar, for formats that do not write values as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_metal_lite.chat_formats.schema import Resolver, listed, named_values, properties_of
from vllm_metal_lite.chat_formats.tool import Tool

SCALARS = "integer", "number", "boolean", "null"
_ANNOTATIONS = "title", "description", "default", "examples"


class SchemaRules:
    """The rules of one tool's arguments.

    lines: the grammar of all tools; rules are added as needed.  base: a format's own lines, which
    define the rules `any`, `string` and `object`.  A subclass defines how its format writes values.
    """

    separator = ","

    def __init__(self, lines: list[str], tool: Tool, base: Sequence[str]) -> None:
        self._lines, self._tool = lines, tool
        self._resolve = Resolver(tool.parameters)
        self._rules: dict[str, str] = {}  # names by schema
        self._unwritten: list[tuple[int, Any]] = []  # the line of each rule, and its schema
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

    def whole(self, schema: Mapping[str, Any]) -> str:
        """All arguments by one of their alternatives, as terminals."""
        return self._terminals(schema)

    def arguments(self) -> str:
        """The name of a rule for all arguments."""
        name = self._add(" | ".join(map(self.whole, self._tool.arguments)))
        for at, schema in self._unwritten:  # grows
            self._lines[at] += " | ".join(map(self._terminals, self._resolve(schema)))
        return name

    def pairs(self, schema: Mapping[str, Any], key: Callable[[str], str]) -> str:
        """The name of a rule for the pairs of an object: required ones, and perhaps others."""
        required = listed(schema, "required")
        between = json.dumps(self.separator)
        # Rules for the remaining pairs: if no pair precedes them, and if one does.
        first, later = '""', '""'
        properties = properties_of(schema)
        for name in reversed(self.order(properties)):
            pair = f"{key(name)} {self._rule(properties[name])}"
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
        """The name of a schema's rule; `arguments` writes it, because schemas may be cyclic."""
        if isinstance(schema, dict):
            schema = {k: v for k, v in schema.items() if k not in _ANNOTATIONS}
        key = json.dumps(schema)
        if key not in self._rules:
            self._unwritten.append((len(self._lines), schema))
            self._rules[key] = self._add("")
        return self._rules[key]

    def _terminals(self, schema: Mapping[str, Any]) -> str:
        """A value by one alternative of its schema."""
        if values := named_values(schema):
            return " | ".join(map(self.constant, values))
        kind = schema.get("type")
        if kind == "array":
            item, more = self._rule(schema.get("items")), json.dumps(self.separator)
            return f'"[" ({item} ({more} {item})*)? "]"'
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return f'"{{" {self.pairs(schema, self.key)} "}}"'
        if kind in SCALARS:
            return self.scalar(schema)
        return {"string": "string", "object": "object"}.get(str(kind), "any")
