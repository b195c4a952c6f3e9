"""`/v1/chat/completions`."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from json import dumps
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite.server.errors import ApiError, openai_shape
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields
from vllm_metal_lite.server.openai_api.logprobs import (
    TokenNames,
    chat_logprobs,
    check_most,
    prompt_logprobs,
)
from vllm_metal_lite.server.openai_api.reply import Reply, StreamOptions, check_stream, ending
from vllm_metal_lite.server.params import (
    ResponseFormat,
    SamplingFields,
    Unsupported,
    allowing,
    sampling_params,
)
from vllm_metal_lite.server.prompts import render
from vllm_metal_lite.server.server import Server, endpoint
from vllm_metal_lite.server.stream import COMMENT, EventStream
from vllm_metal_lite.server.worker.generation import Generation, Positions


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
    response_format: ResponseFormat = None
    modalities: Annotated[Unsupported, allowing(["text"])] = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    structured_outputs: Unsupported = None
    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
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
    check_most("top_logprobs", body.top_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    async with AsyncExitStack() as stack:
        spec, engine = await stack.enter_async_context(server.models.use(body.model))
        params = sampling_params(engine.facts, body.sampling(), body.names())
        conversation = body.conversation(body.messages)
        prompt = await render(engine, conversation)
        last = conversation.messages[-1]
        echoed = last["content"] if body.echo and last["role"] == "assistant" else ""
        generation = await stack.enter_async_context(
            server.generate(
                engine, "chatcmpl-", prompt.token_ids, params,
                priority=body.priority or 0, checkpoints=prompt.checkpoints,
            )
        )  # fmt: skip
        scores = _Scores(body, TokenNames(engine.tokenizer, bool(body.return_tokens_as_token_ids)))
        if body.stream:
            reply = Reply("chat.completion.chunk", spec.name, [generation], body.stream_options)
            events = reply.stream(_chunks(reply, generation, echoed, scores))
            return EventStream(events, COMMENT, server.config.keep_alive, stack.pop_all())
        choices = [
            {
                "index": answer.index,
                "message": {
                    "role": "assistant", "content": echoed + answer.text, "refusal": None
                },
                "logprobs": scores.of(answer.token_ids, answer.logprobs),
                **ending(answer),
            }
            for answer in await generation.complete()
        ]  # fmt: skip
        whole = Reply("chat.completion", spec.name, [generation]).whole(choices)
        if generation.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs)
        return JSONResponse(whole)
    raise AssertionError("an exit stack hides no exception")


class _Scores:
    """Log-probabilities in the form that a request asks for."""

    def __init__(self, body: ChatCompletionRequest, names: TokenNames) -> None:
        self._top, self._names = body.top_logprobs or 0, names

    def of(self, token_ids: list[int], positions: Positions | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        return chat_logprobs(token_ids, positions, self._top, self._names)


async def _chunks(
    reply: Reply, generation: Generation, echoed: str, scores: _Scores
) -> AsyncIterator[bytes]:
    begun: set[int] = set()
    async for delta in generation.deltas():
        answer, text, chunk = delta.answer, delta.text, b""
        if answer.index not in begun:
            begun.add(answer.index)
            role = '"delta":{"role":"assistant","content":""}'
            chunk = reply.chunk(answer.index, role, num_unshown=len(delta.token_ids))
            text = echoed + text
        logprobs = scores.of(delta.token_ids, delta.logprobs)
        if reply.needs_chunk(text, answer, delta.token_ids and logprobs):
            content = f'"delta":{{"content":{dumps(text)}}}'
            chunk += reply.chunk(answer.index, content, answer, logprobs)
        if chunk:
            yield chunk


def routes(server: Server) -> list[Route]:
    serve = endpoint(server, ChatCompletionRequest, chat_completions, openai_shape)
    return [Route("/v1/chat/completions", serve, methods=["POST"])]
