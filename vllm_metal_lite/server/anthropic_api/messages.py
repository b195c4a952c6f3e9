"""`/v1/messages` and `/v1/messages/count_tokens`."""

from dataclasses import replace
from typing import Any, Literal

from starlette.responses import JSONResponse, Response

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.rules import whole
from vllm_metal_lite.server.anthropic_api import request_content
from vllm_metal_lite.server.anthropic_api.reply import PING, MessageReply
from vllm_metal_lite.server.body import Body
from vllm_metal_lite.server.conversations import ChatRequest, render
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import type_of
from vllm_metal_lite.server.params import SamplingFields, Unsupported
from vllm_metal_lite.server.request_tools import add_tool, check_demand, check_named, function_tool
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.turns import answer
from vllm_metal_lite.server.whole_json import whole_json

_MODES: dict[str, Literal["auto", "required", "none", "named"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
    "tool": "named",
}


class CountTokensRequest(Body):
    """system: checked with the messages.  context_management: has no effect."""

    messages: list[dict[str, Any]]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thinking: Any = None
    context_management: Any = None
    mcp_servers: Unsupported = None
    output_format: dict[str, Any] | None = None

    def conversation(self) -> ChatRequest:
        """Raises ApiError (400) for what this server does not have."""
        tools, choice = message_tools(self.tools, self.tool_choice)
        enabled, effort, budget = thinking_of(self.thinking, self.output_config)
        conversation = request_content.conversation(self.messages, self.system)
        thinking: dict[str, Any] = {"enable_thinking": enabled, "effort": effort}
        return replace(conversation, tools=tools, choice=choice, thinking_budget=budget, **thinking)


class MessagesRequest(CountTokensRequest, SamplingFields):
    """max_tokens has no default in this API."""

    max_tokens: Any
    stop_sequences: Any = None
    metadata: Any = None
    service_tier: Any = None

    def check(self) -> None:
        if self.max_tokens is None:
            raise bad("max_tokens", ": Field required, got None")

    def form(self) -> tuple[Any, str]:
        if self.output_format is not None:  # the older name
            return self.output_format, "output_format"
        return (self.output_config or {}).get("format"), "output_config.format"


async def create_message(serving: Serving, body: MessagesRequest) -> Response:
    request, deltas = await answer(serving, body, body.conversation(), "msg_")
    reply = MessageReply(request, deltas, serving.model_name)
    if body.stream:
        return serving.stream(reply.stream(), PING)
    whole = await reply.whole()
    return await whole_json(lambda: whole)


async def count_tokens(serving: Serving, body: CountTokensRequest) -> Response:
    prompt = await render(serving.model, body.conversation(), to_run=False)
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


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
