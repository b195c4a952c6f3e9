"""`tools`, `tool_choice` and `parallel_tool_calls` of chat completions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.tools import bad, check_named, function_tool


def chat_tools(
    definitions: Any, choice: Any, parallel: bool | None
) -> tuple[list[Tool], ToolChoice]:
    """The tools of a request, and what the answer may or must call.  Raises ApiError (400)."""
    tools: list[Tool] = []
    taken: set[str] = set()
    for i, definition in enumerate(definitions or ()):
        where = f"tools.{i}"
        kind = definition.get("type") if isinstance(definition, Mapping) else None
        if kind != "function":
            raise bad(f"{where}.type must be 'function', got {show(kind)}", f"{where}.type")
        tools.append(function_tool(definition.get("function"), f"{where}.function", taken=taken))
        taken.add(tools[-1].name)
    return tools, replace(_choice(tools, choice), parallel=parallel is not False)


def _choice(tools: Sequence[Tool], choice: Any) -> ToolChoice:
    where = "tool_choice"
    if choice in ("none", "auto", None):
        return ToolChoice(choice or "auto")
    if not tools:
        raise bad(f"{where} needs tools, got {show(choice)} without any", where)
    if choice == "required":
        return ToolChoice("required")
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return ToolChoice("named", _name(choice, tools, where))
    if kind == "allowed_tools":
        return _allowed(tools, choice.get(kind), f"{where}.{kind}")
    raise bad(
        f"{where} must be 'none', 'auto', 'required', a function or allowed_tools, "
        f"got {show(choice)}",
        where,
    )


def _allowed(tools: Sequence[Tool], allowed: Any, where: str) -> ToolChoice:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    named = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise bad(
            f"{where} must have a mode, 'auto' or 'required', and tools, got {show(allowed)}", where
        )
    names = (_name(entry, tools, f"{where}.tools.{i}") for i, entry in enumerate(named))
    return ToolChoice(mode, allowed=frozenset(names))


def _name(choice: Any, tools: Sequence[Tool], where: str) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return check_named(name, tools, f"{where}.function.name")
