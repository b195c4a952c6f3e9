"""Tools, their choice, and thinking, as Anthropic's API has them.  Errors are ApiError (400)."""

from typing import Any, Literal

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.rules import whole
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import type_of
from vllm_metal_lite.server.request_tools import add_tool, check_demand, check_named, function_tool

_MODES: dict[str, Literal["auto", "required", "none", "named"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
    "tool": "named",
}


def message_tools(definitions: Any, choice: Any) -> tuple[list[Tool], ToolChoice]:
    """The tools of a request, and what the answer may or must call.

    Tools that Anthropic's servers would run (web search, ...) are refused: leaving them out would
    change what the user asked for.
    """
    tools: dict[str, Tool] = {}
    for i, definition in enumerate(definitions or ()):
        where = f"tools.{i}"
        if (kind := type_of(definition)) not in (None, "custom"):
            raise bad(where, f": tools of type {show(kind)} are not supported")
        add_tool(tools, function_tool(definition, where, "input_schema"), f"{where}.name")
    return list(tools.values()), ToolChoice() if choice is None else _choice(tools, choice)


def _choice(tools: dict[str, Tool], choice: Any) -> ToolChoice:
    where, kind = "tool_choice", type_of(choice)
    if kind not in _MODES:
        raise must_be(f"{where}.type", "auto, any, tool or none", kind)
    name = check_named(choice.get("name"), tools, f"{where}.name") if kind == "tool" else None
    parallel = choice.get("disable_parallel_tool_use") is not True
    return check_demand(ToolChoice(_MODES[kind], name, parallel), tools)


def thinking_of(thinking: Any, output_config: Any) -> tuple[bool | None, str | None, int | None]:
    """(whether to think, effort, most tokens of thoughts); None: the request does not say.

    thinking: {"type": "enabled", "budget_tokens": N}, {"type": "disabled"}, {"type": "adaptive"}.
    output_config: {"effort": ...}.
    """
    enabled = budget = None
    if thinking is not None:
        kind = type_of(thinking)
        if kind not in ("enabled", "disabled", "adaptive"):
            raise must_be("thinking.type", "enabled, disabled or adaptive", kind)
        if kind != "adaptive":
            enabled = kind == "enabled"
        budget = whole(thinking.get("budget_tokens")) if enabled else None
        if budget is not None and (type(budget) is not int or budget < 1):
            raise must_be("thinking.budget_tokens", "an integer of at least 1", budget)
    effort = (output_config or {}).get("effort")
    return enabled, effort if isinstance(effort, str) else None, budget
