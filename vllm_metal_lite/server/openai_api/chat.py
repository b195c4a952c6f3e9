"""`/v1/chat/completions`."""

from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.server.errors import ApiError, openai_shape
from vllm_metal_lite.server.large_json import large_json
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields
from vllm_metal_lite.server.openai_api.chat_reply import chunks, whole_choices
from vllm_metal_lite.server.openai_api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from vllm_metal_lite.server.openai_api.reply import Reply, StreamOptions, check_stream
from vllm_metal_lite.server.params import (
    OnlyText,
    SamplingFields,
    Unsupported,
    sampling_params,
)
from vllm_metal_lite.server.server import Server, endpoint
from vllm_metal_lite.server.stream import COMMENT, EventStream
from vllm_metal_lite.server.structured import with_form
from vllm_metal_lite.server.turns import prepare


class ChatCompletionRequest(ConversationFields, SamplingFields):
    model: str | None = None
    messages: list[dict[str, Any]]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: Any = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    modalities: OnlyText = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    use_beam_search: Unsupported = None

    def sampling(self) -> dict[str, Any]:
        fields = super().sampling()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        fields["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return fields

    def names(self) -> dict[str, str]:
        """Fields that this API calls otherwise."""
        renamed = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        return renamed


async def chat_completions(
    server: Server, request: Request, body: ChatCompletionRequest
) -> Response:
    check_stream(body.stream, body.stream_options, body.prompt_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    async with AsyncExitStack() as stack:
        spec, engine = await stack.enter_async_context(server.models.use(body.model))
        params = sampling_params(server.config, engine.facts, body.sampling(), body.names())
        params = await with_form(params, body.response_format, "response_format")
        conversation, choice = body.conversation(body.messages)
        turn = await prepare(engine, conversation, choice, params, body.thinking_token_budget)
        last = conversation.messages[-1]
        echoed = last["content"] if body.echo and last["role"] == "assistant" else ""
        generating = turn.generate(server, engine, "chatcmpl-", body)
        generation = await stack.enter_async_context(generating)
        names = TokenNames(engine.tokenizer, bool(body.return_tokens_as_token_ids))
        scores = partial(chat_logprobs, top=body.top_logprobs or 0, names=names)
        deltas = turn.deltas(generation)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        reply = Reply(kind, spec.name, [generation], body.stream_options)
        if body.stream:
            events = reply.stream(chunks(reply, deltas, echoed, scores))
            return EventStream(events, COMMENT, server.config.keep_alive, stack.pop_all())
        whole = reply.whole(await whole_choices(reply, deltas, params.n, echoed, scores))
        if params.logprobs is None and params.prompt_logprobs is None:
            return JSONResponse(whole)

        def scored() -> dict[str, Any]:
            if params.prompt_logprobs is not None:
                whole["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs)
            return whole

        return await large_json(scored)
    raise AssertionError("an exit stack hides no exception")


def routes(server: Server) -> list[Route]:
    serve = endpoint(server, ChatCompletionRequest, chat_completions, openai_shape)
    return [Route("/v1/chat/completions", serve, methods=["POST"])]
