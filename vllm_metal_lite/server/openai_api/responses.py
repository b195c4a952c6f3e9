"""`/v1/responses`, without a store: each request brings the whole conversation."""

from contextlib import AsyncExitStack
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.deltas import Positions
from vllm_metal_lite.server.errors import ApiError, openai_shape
from vllm_metal_lite.server.large_json import large_json
from vllm_metal_lite.server.openai_api.logprobs import TokenNames, chat_logprobs
from vllm_metal_lite.server.openai_api.response_events import ResponseReply
from vllm_metal_lite.server.openai_api.response_items import input_messages
from vllm_metal_lite.server.openai_api.response_tools import ResponseTools, response_tools
from vllm_metal_lite.server.params import (
    SamplingFields,
    Unsupported,
    sampling_params,
)
from vllm_metal_lite.server.prompts import Conversation
from vllm_metal_lite.server.server import Server, endpoint
from vllm_metal_lite.server.stream import EventStream
from vllm_metal_lite.server.structured import with_form
from vllm_metal_lite.server.turns import prepare

_LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(BaseModel):
    """effort: a variable of the chat template.  summary: thoughts are shown as a summary."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the older name

    @property
    def shows_summary(self) -> bool:
        return (self.summary or self.generate_summary or "none") != "none"


class ResponsesRequest(SamplingFields):
    """Fields of any type are repeated in the response and have no effect."""

    model: str | None = None
    input: Any
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Any = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    client_metadata: Any = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: Any = None
    user: str | None = None
    background: Unsupported = None
    conversation: Unsupported = None
    max_tool_calls: Any = None
    previous_response_id: str | None = None
    prompt: Unsupported = None

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            fields["logprobs"] = self.top_logprobs or 0
        return {**fields, "max_tokens": self.max_output_tokens}

    def echo(self, model: str, params: SamplingParams, tools: ResponseTools) -> dict[str, Any]:
        """Fields of the response that repeat the request, with the values that are in effect."""
        return {
            "model": model,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": (self.reasoning or ReasoningOptions()).model_dump(),
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "background": False,
            "text": {"format": {"type": "text"}, **(self.text or {})},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": tools.definitions,
            "truncation": "disabled",
            "user": self.user,
        }


_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


async def create_response(server: Server, request: Request, body: ResponsesRequest) -> Response:
    _check(body)
    parallel = body.parallel_tool_calls is not False
    tools = response_tools(body.tools, body.input, body.tool_choice, parallel)
    reasoning = body.reasoning or ReasoningOptions()
    messages = input_messages(body.input, body.instructions)
    async with AsyncExitStack() as stack:
        spec, engine = await stack.enter_async_context(server.models.use(body.model))
        params = sampling_params(server.config, engine.facts, body.sampling(), _NAMES)
        params = await with_form(params, (body.text or {}).get("format"), "text.format")
        conversation = Conversation(messages, tools=tools.tools, effort=reasoning.effort)
        turn = await prepare(engine, conversation, tools.choice, params)
        generating = turn.generate(server, engine, "resp_", body)
        generation = await stack.enter_async_context(generating)
        names, top = TokenNames(engine.tokenizer), body.top_logprobs or 0

        def scores(token_ids: list[int], positions: Positions | None) -> list[dict[str, Any]]:
            found = chat_logprobs(token_ids, positions, top=top, names=names)
            return [] if found is None else found["content"]

        deltas = turn.deltas(generation)
        echo = body.echo(spec.name, params, tools)
        reply = ResponseReply(
            generation, deltas, tools.callees, reasoning.shows_summary, echo, scores
        )
        if body.stream:
            seconds = server.config.keep_alive
            return EventStream(reply.stream(), reply.keep_alive, seconds, stack.pop_all())
        whole = await reply.whole()
        return JSONResponse(whole) if params.logprobs is None else await large_json(lambda: whole)
    raise AssertionError("an exit stack hides no exception")


def _check(body: ResponsesRequest) -> None:
    """Raise ApiError (400) for what this server does not have."""
    if body.previous_response_id is not None:
        raise ApiError(
            400,
            "previous_response_id is not supported, because no response is stored: send the whole "
            "conversation",
            param="previous_response_id",
        )


def routes(server: Server) -> list[Route]:
    serve = endpoint(server, ResponsesRequest, create_response, openai_shape)
    return [Route("/v1/responses", serve, methods=["POST"])]
