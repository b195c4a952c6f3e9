"""`/v1/messages` and `/v1/messages/count_tokens`."""

import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.chat_formats.tool import ToolChoice
from vllm_metal_lite.server.anthropic_api import blocks
from vllm_metal_lite.server.anthropic_api.reply import PING, MessageReply
from vllm_metal_lite.server.anthropic_api.tools import message_tools, thinking_of
from vllm_metal_lite.server.errors import ApiError, anthropic_shape
from vllm_metal_lite.server.params import (
    SamplingFields,
    Unsupported,
    sampling_params,
)
from vllm_metal_lite.server.prompts import Conversation, render
from vllm_metal_lite.server.server import Body, Server, endpoint
from vllm_metal_lite.server.stream import EventStream
from vllm_metal_lite.server.structured import with_form
from vllm_metal_lite.server.turns import prepare


class ConversationFields(Body):
    """system: checked with the messages.  Other fields of any type have no effect."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thinking: Any = None
    context_management: Any = None
    mcp_servers: Unsupported = None
    output_format: dict[str, Any] | None = None

    def conversation(self) -> tuple[Conversation, ToolChoice, int | None]:
        """What is rendered, the calls that the answer may or must hold, and the budget of thoughts.

        Raises ApiError (400) for what this server does not have.
        """
        tools, choice = message_tools(self.tools, self.tool_choice)
        enabled, effort, budget = thinking_of(self.thinking, self.output_config)
        conversation = blocks.conversation(self.messages, self.system)
        conversation = replace(conversation, tools=tools, enable_thinking=enabled, effort=effort)
        return conversation, choice, budget


class MessagesRequest(ConversationFields, SamplingFields):
    """max_tokens has no default in this API."""

    max_tokens: Any
    stop_sequences: Any = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None

    def sampling(self) -> dict[str, Any]:
        fields = {**super().sampling(), "max_tokens": self.max_tokens}
        if self.stop_sequences is not None:
            fields["stop"] = self.stop_sequences
        return fields


async def create_message(server: Server, request: Request, body: MessagesRequest) -> Response:
    if body.max_tokens is None:
        raise ApiError(400, "max_tokens: Field required, got None", param="max_tokens")
    async with AsyncExitStack() as stack:
        spec, engine = await stack.enter_async_context(server.models.use(body.model))
        names = {"stop": "stop_sequences"} if body.stop_sequences is not None else {}
        params = sampling_params(server.config, engine.facts, body.sampling(), names)
        form, where = body.output_format, "output_format"
        if form is None:  # the newer name
            form, where = (body.output_config or {}).get("format"), "output_config.format"
        params = await with_form(params, form, where)
        conversation, choice, budget = body.conversation()
        turn = await prepare(engine, conversation, choice, params, budget)
        generating = turn.generate(server, engine, "msg_", body)
        generation = await stack.enter_async_context(generating)
        deltas = turn.deltas(generation)
        reply = MessageReply(generation, deltas, spec.name)
        if body.stream:
            return EventStream(reply.stream(), PING, server.config.keep_alive, stack.pop_all())
        return JSONResponse(await reply.whole())
    raise AssertionError("an exit stack hides no exception")


async def count_tokens(server: Server, request: Request, body: ConversationFields) -> Response:
    async with server.models.use(body.model) as (_, engine):
        prompt = await render(engine, body.conversation()[0], to_run=False)
        return JSONResponse({"input_tokens": len(prompt.token_ids)})
    raise AssertionError("the models hide no exception")


def routes(server: Server) -> list[Route]:
    create = endpoint(server, MessagesRequest, create_message, anthropic_shape)
    count = endpoint(server, ConversationFields, count_tokens, anthropic_shape)
    return [
        Route("/v1/messages", _with_id(create), methods=["POST"]),
        Route("/v1/messages/count_tokens", _with_id(count), methods=["POST"]),
    ]


def _with_id(
    serve: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """With the header in which clients look for an id to report."""

    @wraps(serve)
    async def served(request: Request) -> Response:
        response = await serve(request)
        response.headers["request-id"] = f"req_{uuid.uuid4().hex}"
        return response

    return served
