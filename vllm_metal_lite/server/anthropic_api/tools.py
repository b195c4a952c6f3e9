"""Tools, their choice, and thinking, as Anthropic's API has them."""

from collections.abc import Mapping
from typing import Any, Literal

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.rules import whole
from vllm_metal_lite.server.tools import bad, check_named, function_tool

_MODES: dict[Any, Literal["auto", "required", "none"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
}


def message_tools(definitions: Any, choice: Any) -> tuple[list[Tool], ToolChoice]:
    """The tools of a request, and what the answer may or must call.  Raises ApiError (400).

    Tools that Anthropic's servers would run (web search, ...) are refused: leaving them out would
    change what the user asked for.
    """
    tools: list[Tool] = []
    taken: set[str] = set()
    for i, definition in enumerate(definitions or ()):
        where = f"tools.{i}"
        kind = definition.get("type") if isinstance(definition, Mapping) else None
        if kind not in (None, "custom"):
            raise bad(f"{where}: tools of type {show(kind)} are not supported", f"{where}.type")
        tools.append(function_tool(definition, where, schema="input_schema", taken=taken))
        taken.add(tools[-1].name)
    return tools, _choice(tools, choice)


def _choice(tools: list[Tool], choice: Any) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    where, kind = "tool_choice", choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in (*_MODES, "tool"):
        raise bad(f"{where}.type must be auto, any, tool or none, got {show(kind)}", where)
    if kind in ("any", "tool") and not tools:
        raise bad(f"{where} needs tools, got {show(kind)} without any", where)
    parallel = choice.get("disable_parallel_tool_use") is not True
    if kind == "tool":
        name = check_named(choice.get("name"), tools, f"{where}.name")
        return ToolChoice("named", name, parallel)
    return ToolChoice(_MODES[kind], None, parallel)


def thinking_of(thinking: Any, output_config: Any) -> tuple[bool | None, str | None, int | None]:
    """Whether the model shall think, how much, and for how many tokens at most; None: not said.

    thinking: {"type": "enabled", "budget_tokens": N}, {"type": "disabled"}, {"type": "adaptive"}.
    output_config: {"effort": ...}.  Raises ApiError (400).
    """
    enabled = budget = None
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        if kind not in ("enabled", "disabled", "adaptive"):
            where = "thinking.type"
            raise bad(f"{where} must be enabled, disabled or adaptive, got {show(kind)}", where)
        if kind != "adaptive":
            enabled = kind == "enabled"
        budget = whole(thinking.get("budget_tokens")) if kind == "enabled" else None
        if budget is not None and (type(budget) is not int or budget < 1):
            where = "thinking.budget_tokens"
            raise bad(f"{where} must be an integer of at least 1, got {show(budget)}", where)
    effort = output_config.get("effort") if isinstance(output_config, Mapping) else None
    return enabled, effort if isinstance(effort, str) else None, budget
