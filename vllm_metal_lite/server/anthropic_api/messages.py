"""`/v1/messages` and `/v1/messages/count_tokens`."""

from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from vllm_metal_lite.server.anthropic_api import request_content
from vllm_metal_lite.server.anthropic_api.reply import PING, MessageReply
from vllm_metal_lite.server.anthropic_api.tools import message_tools, thinking_of
from vllm_metal_lite.server.body import Body
from vllm_metal_lite.server.conversations import ChatRequest, render
from vllm_metal_lite.server.errors import bad
from vllm_metal_lite.server.params import SamplingFields, Unsupported
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.turns import answer
from vllm_metal_lite.server.whole_json import whole_json


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
