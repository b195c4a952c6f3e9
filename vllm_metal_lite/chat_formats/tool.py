"""The tools of a request."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from vllm_metal_lite.chat_formats.schema import (
    Resolver,
    Schema,
    bare_text,
    listed,
    named_values,
    properties_of,
    types_of,
)
from vllm_metal_lite.structured_outputs.json_schema import rebuilt


@dataclass(frozen=True)
class Tool:
    """parameters: the JSON schema of the arguments.  strict: calls must follow the schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False

    @cached_property
    def held(self) -> dict[str, Any]:
        """The schema that grammars hold calls to.

        As in vLLM, objects have only the properties that the schema names.  Pydantic's schemas
        allow others, and small models would invent keys without end.  No grammar can hold
        `uniqueItems`, which Pydantic writes for sets; it is dropped from tools that are not strict.
        """
        parts: list[dict[str, Any]] = []

        def find(part: dict[str, Any], place: str) -> dict[str, Any]:
            parts.append(part)
            return part

        def change(part: dict[str, Any], place: str) -> dict[str, Any]:
            kept = {k: v for k, v in part.items() if self.strict or k != "uniqueItems"}
            closed = {"additionalProperties": False} if closes and properties_of(part) else {}
            return {**closed, **kept}

        rebuilt(self.parameters, find)
        closes = all(map(_can_be_closed, parts))
        schema: dict[str, Any] = rebuilt(self.parameters, change)
        return schema

    @cached_property
    def arguments(self) -> list[Schema]:
        """The alternatives of all arguments, see `Resolver`: each is an object."""
        return Resolver(self.held)({"type": "object", **self.held})

    @cached_property
    def types(self) -> dict[str, set[str]]:
        """The JSON types of each argument by its name; empty: any."""
        return {name: types_of(schemas) for name, schemas in self._alternatives.items()}

    @cached_property
    def named(self) -> dict[str, dict[str, Any]]:
        """The values that the schema of each argument names, by their texts without quotes."""
        return {
            name: {bare_text(v): v for schema in schemas for v in named_values(schema)}
            for name, schemas in self._alternatives.items()
        }

    @cached_property
    def _alternatives(self) -> dict[str, list[Schema]]:
        resolve = Resolver(self.held)
        schemas: dict[str, list[Any]] = {}
        for whole in self.arguments:
            for name, schema in properties_of(whole).items():
                schemas.setdefault(name, []).append(schema)
        return {name: resolve({"anyOf": parts}) for name, parts in schemas.items()}

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates want it; some fail without `parameters`."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _can_be_closed(part: dict[str, Any]) -> bool:
    """Whether this part of a schema names all properties of its object, and no other part adds
    any."""
    named, required = properties_of(part), listed(part, "required")
    if any(key in part for key in ("allOf", "anyOf", "oneOf", "$ref")):
        return not (named or required or "allOf" in part)
    return not named or (
        "minProperties" not in part
        and all(isinstance(name, str) and name in named for name in required)
    )


@dataclass(frozen=True)
class ToolChoice:
    """Which calls an answer may, or must, contain.

    name: the tool of mode "named".  parallel: several calls may come.  allowed: names of the tools
    that may be called; None: all that the model is shown.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None

    def allows(self, tool: Tool) -> bool:
        return self.allowed is None or tool.name in self.allowed
