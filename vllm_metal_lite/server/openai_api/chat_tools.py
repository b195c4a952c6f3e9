"""`tools`, `tool_choice` and `parallel_tool_calls` of chat completions."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import type_of
from vllm_metal_lite.server.request_tools import add_tool, check_named, function_tool


def chat_tools(
    definitions: Any, choice: Any, parallel: bool | None
) -> tuple[list[Tool], ToolChoice]:
    """The tools of a request, and what the answer may or must call.  Raises ApiError (400)."""
    tools: dict[str, Tool] = {}
    for i, definition in enumerate(definitions or ()):
        where = f"tools.{i}"
        if (kind := type_of(definition)) != "function":
            raise must_be(f"{where}.type", "'function'", kind)
        where += ".function"
        add_tool(tools, function_tool(definition.get("function"), where), f"{where}.name")
    return list(tools.values()), replace(_choice(tools, choice), parallel=parallel is not False)


def _choice(tools: Collection[str], choice: Any) -> ToolChoice:
    where = "tool_choice"
    if choice in ("none", "auto", None):
        return ToolChoice(choice or "auto")
    if not tools:
        raise bad(where, f" is {show(choice)}, but the request has no tools")
    if choice == "required":
        return ToolChoice("required")
    kind = type_of(choice)
    if kind == "function":
        return ToolChoice("named", _name(choice, tools, where))
    if kind == "allowed_tools":
        return _allowed(tools, choice.get(kind), f"{where}.{kind}")
    raise must_be(where, "'none', 'auto', 'required', a function or allowed_tools", choice)


def _allowed(tools: Collection[str], allowed: Any, where: str) -> ToolChoice:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    named = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        words = " must have a mode, 'auto' or 'required', and tools, got "
        raise bad(where, words + show(allowed))
    names = (_name(entry, tools, f"{where}.tools.{i}") for i, entry in enumerate(named))
    return ToolChoice(mode, allowed=frozenset(names))


def _name(choice: Any, tools: Collection[str], where: str) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return check_named(name, tools, f"{where}.function.name")
