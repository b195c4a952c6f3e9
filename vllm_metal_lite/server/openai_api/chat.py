"""`/v1/chat/completions`."""

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from vllm_metal_lite.server.deltas import whole_answers
from vllm_metal_lite.server.errors import bad
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields
from vllm_metal_lite.server.openai_api.chat_reply import ChatWriter
from vllm_metal_lite.server.openai_api.completion_fields import CompletionFields
from vllm_metal_lite.server.openai_api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from vllm_metal_lite.server.openai_api.reply import Reply
from vllm_metal_lite.server.params import OnlyText, Unsupported
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.turns import answer
from vllm_metal_lite.server.whole_json import whole_json


class ChatCompletionRequest(ConversationFields, CompletionFields):
    messages: list[dict[str, Any]]
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    modalities: OnlyText = None
    audio: Unsupported = None
    web_search_options: Unsupported = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad("top_logprobs", " needs logprobs to be true")

    def sampling(self) -> dict[str, Any]:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return {**super().sampling(), "logprobs": logprobs}


async def chat_completions(serving: Serving, body: ChatCompletionRequest) -> Response:
    conversation = replace(
        body.conversation(body.messages), thinking_budget=body.thinking_token_budget
    )
    request, deltas = await answer(serving, body, conversation, "chatcmpl-")
    params, last = request.params, conversation.messages[-1]
    echoed = last["content"] if body.echo and last["role"] == "assistant" else ""
    names = TokenNames(serving.model.tokenizer, bool(body.return_tokens_as_token_ids))
    scores = partial(chat_logprobs, top=body.top_logprobs or 0, names=names)
    writers = [ChatWriter(echoed, scores, bool(body.tools)) for _ in range(params.n)]
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    reply = Reply(kind, serving.model_name, [request], writers, body.stream_options)
    if body.stream:
        return serving.stream(reply.stream(deltas))
    answers = await whole_answers(deltas)

    def whole() -> dict[str, Any]:
        scored = {}
        if params.prompt_logprobs is not None:
            scored["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs)
        return reply.whole(answers) | scored

    return await whole_json(whole)
