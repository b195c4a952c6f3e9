"""The tools of a request of any API.  All functions raise ApiError (400)."""

from collections.abc import Collection, Mapping
from typing import Any

from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import optional, required_text


def function_tool(definition: Any, where: str, schema: str = "parameters") -> Tool:
    """A Tool of a definition with name, description and schema.

    where: names the definition in errors.  schema: the name of the field that holds it.
    """
    if not isinstance(definition, Mapping):
        raise must_be(where, "an object", definition)
    name = required_text(definition, "name", where)
    description = optional(definition, "description", str, where) or ""
    parameters = optional(definition, schema, dict, where) or {}
    optional(parameters, "properties", dict, f"{where}.{schema}")
    optional(parameters, "required", list, f"{where}.{schema}")
    return Tool(name, description, parameters, definition.get("strict") is True)


def add_tool(tools: dict[str, Tool], tool: Tool, where: str) -> None:
    if tool.name in tools:
        raise bad(where, f": two tools have the name {show(tool.name)}")
    tools[tool.name] = tool


def check_named(name: Any, tools: Collection[str], where: str) -> str:
    """The name of a tool of the request."""
    if not isinstance(name, str) or name not in tools:
        raise bad(where, f" names {show(name)}, which is not in tools")
    return name
