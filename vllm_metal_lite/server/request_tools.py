"""The tools of a request of any API.  All functions raise ApiError (400)."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import optional, required_text, type_of


def function_tool(definition: Any, where: str, schema: str = "parameters") -> Tool:
    """The Tool that a definition with name, description and schema describes.

    where: the place of the definition, for errors.  schema: the name of the schema's field.
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
    """A name that must be that of a tool of the request."""
    if not isinstance(name, str) or name not in tools:
        raise bad(where, f" names {show(name)}, which is not in tools")
    return name


def check_demand(choice: ToolChoice, tools: Mapping[str, Tool]) -> ToolChoice:
    """The choice itself.  It is refused if it demands a call and no tool may be called."""
    demands = choice.mode in ("required", "named")
    if demands and not any(map(choice.allows, tools.values())):
        raise bad("tool_choice", " demands a call, but the request has no tools that may be called")
    return choice


def openai_choice(
    choice: Any,
    parallel: bool | None,
    tools: Mapping[str, Tool],
    kinds: Collection[str],
    name_of: Callable[[Any, str], str | None],
) -> ToolChoice:
    """The ToolChoice of the field `tool_choice` of OpenAI's APIs.

    kinds: the types of tools that the model can call.
    name_of: a function that gives the model's name of the tool that an object names, or None for a
    tool that is left out.
    """
    where, parallel = "tool_choice", parallel is not False
    if choice in (None, "auto", "none", "required"):
        return check_demand(ToolChoice(choice or "auto", parallel=parallel), tools)
    kind = type_of(choice)
    if kind in kinds:
        return ToolChoice("named", name_of(choice, where), parallel)
    if kind != "allowed_tools":
        allowed = "'auto', 'none', 'required', a tool that may be called, or allowed_tools"
        raise must_be(where, allowed, choice)
    if kind in choice:  # chat completions put the fields into one more object
        choice, where = optional(choice, kind, dict, where) or {}, f"{where}.{kind}"
    mode, chosen = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise must_be(f"{where}.mode", "'auto' or 'required'", mode)
    if not isinstance(chosen, list):
        raise must_be(f"{where}.tools", "a list", chosen)
    names = [name_of(tool, f"{where}.tools.{i}") for i, tool in enumerate(chosen)]
    return check_demand(ToolChoice(mode, None, parallel, frozenset(filter(None, names))), tools)
