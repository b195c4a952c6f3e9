"""`tools`, `tool_choice` and `parallel_tool_calls` of chat completions."""

from collections.abc import Mapping
from typing import Any

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.server.errors import must_be
from vllm_metal_lite.server.fields import type_of
from vllm_metal_lite.server.request_tools import add_tool, check_named, function_tool, openai_choice


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

    def name_of(chosen: Any, where: str) -> str:
        function = chosen.get("function") if isinstance(chosen, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        return check_named(name, tools, f"{where}.function.name")

    return list(tools.values()), openai_choice(choice, parallel, tools, ("function",), name_of)
