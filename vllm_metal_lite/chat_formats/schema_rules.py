"""A JSON schema as rules of a grammar, for formats that do not write values as JSON."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from vllm_metal_lite.chat_formats.schema import (
    NUMBERS,
    Resolver,
    Schema,
    listed,
    named_values,
    properties_of,
    unheld,
)
from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.errors import show
from vllm_metal_lite.structured_outputs.json_schema import SchemaError

SCALARS = "integer", "number", "boolean", "null"
_ANNOTATIONS = "title", "description", "default", "examples"


class SchemaRules:
    """The rules of one tool's arguments.

    lines: the grammar of all tools; rules are added as needed.  base: a format's own lines.  A
    format that writes values of all types its own way is a subclass: its lines define the rules
    `any`, `string` and `object`, and `key`, the key of a pair with what stands after it.
    """

    separator = ","
    names = "(?s:.*)"  # see `offered`

    def __init__(self, lines: list[str], tool: Tool, base: Sequence[str] = ()) -> None:
        self.lines, self.tool, self.resolve = lines, tool, Resolver(tool.held)
        self._rules: dict[str, str] = {}  # names by schema
        # Rules to be written: the number of the line, the schema, and the schema's first place.
        self._unwritten: list[tuple[int, Any, str]] = []
        if not lines:
            lines += base

    def arguments(self) -> list[Schema]:
        """The alternatives of all arguments.  Raises SchemaError."""
        if not self.tool.arguments:
            raise self.error("", "no arguments fit")
        if self.tool.strict:
            try:
                self.resolve.check()
            except SchemaError as e:
                raise self.error(e.place, str(e)) from None
        return self.tool.arguments

    def error(self, place: str, why: str) -> SchemaError:
        return SchemaError(f": {show(self.tool.name)}{place}", why)

    def refuse(self, place: str) -> NoReturn:
        raise self.error(place, "calls of this format cannot have it")

    def hold(self, schema: Mapping[str, Any], place: str, *held: str) -> None:
        """Raise SchemaError if the tool is strict, and an alternative of a schema has other limits
        than those `held`.  Other tools get a wider grammar."""
        if self.tool.strict and (key := unheld(schema, *held)):
            raise self.error(place, f"calls of this format cannot be held to {show(key)}")

    def offered(self, schema: Mapping[str, Any], names: str, place: str) -> dict[str, list[Schema]]:
        """The alternatives of an object's properties, without those that no call of this format
        can have.  Raises SchemaError if one of these is required.

        names: a pattern of the names that the format's reader can read.
        """
        found = {}
        for name, part in properties_of(schema).items():
            alternatives = self.resolve(part)
            if alternatives and re.fullmatch(names, name):
                found[name] = alternatives
            elif name in listed(schema, "required"):
                self.refuse(f"{place}.properties.{name}")
        return found

    def add(self, text: str, start: str = "r", attributes: str = "") -> str:
        """The name of a new rule, or of a terminal: these start in upper case."""
        name = f"{start}_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {text}")
        return name

    def key(self, name: str) -> str:
        """The key of an object, with what stands after it, as terminals."""
        raise NotImplementedError

    def constants(self, values: Sequence[Any]) -> list[str]:
        """The terminals for the values of an enumeration.  They are few, even for many values."""
        raise NotImplementedError

    def scalar(self, schema: Mapping[str, Any]) -> str:
        """A number, a boolean or null."""
        return f"%json {json.dumps(schema)}"

    def whole(self, schema: Mapping[str, Any]) -> str:
        """Terminals for all arguments, by one of their alternatives."""
        return self._terminals(schema, "")

    def rule(self) -> str:
        """The name of a rule for all arguments."""
        name = self.add(" | ".join(map(self.whole, self.arguments())))
        for at, alternatives, place in self._unwritten:  # grows
            texts = [self._terminals(schema, place) for schema in alternatives]
            self.lines[at] += " | ".join(texts)
        return name

    def pairs(
        self, schema: Mapping[str, Any], key: Callable[[str], str], names: str, place: str
    ) -> str:
        """The name of a rule for the pairs of an object: required ones, and perhaps others."""
        self.hold(schema, place, "properties", "required", "additionalProperties")
        required = listed(schema, "required")
        between = json.dumps(self.separator)
        # Rules for the remaining pairs: if no pair precedes them, and if one does.
        first, later = '""', '""'
        properties = self.offered(schema, names, place)
        for name in reversed(self.order(properties)):
            pair = f"{key(name)} {self._rule(properties[name], f'{place}.properties.{name}')}"
            skipped = first, later
            first, later = f"{pair} {later}", f"{between} {pair} {later}"
            if name not in required:
                first, later = f"{first} | {skipped[0]}", f"{later} | {skipped[1]}"
            first, later = self.add(first), self.add(later)
        return first

    def order(self, names: Mapping[str, Any]) -> list[str]:
        """Keys in the order in which the model's templates write them."""
        return list(names)

    def _rule(self, alternatives: list[Schema], place: str) -> str:
        """The name of a rule for a value; `rule` writes it, because schemas may be cyclic."""
        bare = [{k: v for k, v in s.items() if k not in _ANNOTATIONS} for s in alternatives]
        if (key := json.dumps(bare)) not in self._rules:
            self._unwritten.append((len(self.lines), bare, place))
            self._rules[key] = self.add("")
        return self._rules[key]

    def _terminals(self, schema: Mapping[str, Any], place: str) -> str:
        """Terminals for a value, by one alternative of its schema."""
        kind, separator = schema.get("type"), json.dumps(self.separator)
        if values := named_values(schema):
            self.hold(schema, place)
            return " | ".join(self.constants(values)) or self.refuse(place)
        if kind in SCALARS:
            self.hold(schema, place, *NUMBERS)
            return self.scalar(schema)
        if kind == "array":
            self.hold(schema, place, "items", "minItems", "maxItems")
            if not (items := self.resolve(schema.get("items"))):
                return '"[" "]"'
            item = self._rule(items, f"{place}.items")
            least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
            if most == 0:
                return '"[" "]"'
            last = "" if most is None else int(most) - 1
            more = f"({separator} {item}){{{max(least - 1, 0)},{last}}}"
            return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return f'"{{" {self.pairs(schema, self.key, self.names, place)} "}}"'
        if kind == "object":
            self.hold(schema, place, "additionalProperties")
            other = schema.get("additionalProperties", True)
            if not (values := self.resolve(other)):
                return '"{" "}"'
            if values != [{}]:
                pair = f"key {self._rule(values, f'{place}.additionalProperties')}"
                return f'"{{" ({pair} ({separator} {pair})*)? "}}"'
            return "object"
        self.hold(schema, place)
        return "string" if kind == "string" else "any"
