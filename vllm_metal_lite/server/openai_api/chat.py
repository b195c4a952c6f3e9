"""`/v1/chat/completions`."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_metal_lite.server.params import sampling_params
from vllm_metal_lite.server.prompts import Conversation, render
from vllm_metal_lite.server.server import Body, Server
from vllm_metal_lite.server.stream import COMMENT, EventStream, sse
from vllm_metal_lite.server.worker.generation import EngineLost, Generation


class ChatCompletionRequest(Body):
    model: str | None = None
    messages: list[dict[str, Any]]
    stream: bool = False
    max_tokens: int | None = None


async def chat_completions(
    server: Server, request: Request, body: ChatCompletionRequest
) -> Response:
    async with AsyncExitStack() as stack:
        spec, engine = await stack.enter_async_context(server.models.use(body.model))
        prompt = await render(engine, Conversation(body.messages))
        params = sampling_params(engine.facts, {"max_tokens": body.max_tokens})
        generation = await stack.enter_async_context(
            server.generate(
                engine, "chatcmpl-", prompt.token_ids, params, checkpoints=prompt.checkpoints
            )
        )
        if not body.stream:
            answers = await generation.complete()
            return JSONResponse({"text": [answer.text for answer in answers]})
        events = _chunks(generation, spec.name)
        return EventStream(events, COMMENT, server.config.keep_alive, stack.pop_all())
    raise AssertionError


async def _chunks(generation: Generation, model: str) -> AsyncIterator[bytes]:
    base = {"id": generation.request_id, "created": int(time.time()), "model": model}
    try:
        async for delta in generation.deltas():
            choice = {
                "index": delta.answer.index,
                "delta": {"content": delta.text},
                "finish_reason": delta.answer.finish_reason,
            }
            yield sse(json.dumps({**base, "choices": [choice]}))
    except EngineLost as e:
        yield sse(json.dumps({"error": {"message": str(e)}}))
    yield sse("[DONE]")
