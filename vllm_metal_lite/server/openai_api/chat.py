"""`/v1/chat/completions`: the request, and its answer as a message or as the deltas of a stream."""

import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.responses import Response

from vllm_metal_lite.server.blocks import Blocks
from vllm_metal_lite.server.deltas import whole_answers
from vllm_metal_lite.server.errors import bad
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields
from vllm_metal_lite.server.openai_api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from vllm_metal_lite.server.openai_api.reply import Choice, ChoiceWriter, CompletionFields, Reply
from vllm_metal_lite.server.params import OnlyText, Unsupported
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.turns import answer
from vllm_metal_lite.server.whole_json import whole_json
from vllm_metal_lite.server.worker.messages import Delta, Position

# The log-probabilities of positions, in the form that a request asks for.
ScoresOf = Callable[[Iterable[Position]], list[Any]]


class ChatWriter(Blocks[Choice], ChoiceWriter):
    """Makes the message of an answer.

    echoed: the text that the answer continues, if the client wants to see it.
    may_call: whether the answer may have calls only, and no content.
    """

    empty: ClassVar = {"delta": {}}
    reports_reasoning = True

    def __init__(self, echoed: str, scores_of: ScoresOf, may_call: bool) -> None:
        self._echoed, self._scores_of, self._may_call = echoed, scores_of, may_call
        self._texts: dict[str, list[str]] = {"text": [echoed], "thoughts": []}
        self._calls: list[tuple[dict[str, Any], list[str]]] = []  # each with its arguments

    async def head(self) -> Choice:
        return {"delta": {"role": "assistant", "content": None if self._may_call else ""}}

    def news(self, delta: Delta) -> list[Choice]:
        echoed, self._echoed = self._echoed, ""
        before = [{"delta": {"content": echoed}}] if echoed else []
        return before + self.take(delta.events)

    def scores(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None or not delta.token_ids:
            return None
        return {"content": self._scores_of(delta.logprobs), "refusal": None}

    def whole(self, delta: Delta) -> Choice:
        self.take(delta.events)
        content, thoughts = map("".join, self._texts.values())
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thoughts:
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        for call, arguments in self._calls:
            call["function"]["arguments"] = "".join(arguments)
        if self._calls:
            message |= {"content": content or None, "tool_calls": [call for call, _ in self._calls]}
        return {"message": message, "logprobs": self.scores(delta)}

    def _open(self, name: str) -> Iterator[Choice]:
        if self.kind == "call":
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            function = {"name": name, "arguments": ""}
            self._calls.append(({"id": call_id, "type": "function", "function": function}, []))
            yield self._call(**self._calls[-1][0])

    def _grow(self, text: str) -> Iterator[Choice]:
        if self.kind == "call":
            self._calls[-1][1].append(text)
            yield self._call(function={"arguments": text})
        else:
            self._texts[self.kind].append(text)
            names = ["content"] if self.kind == "text" else ["reasoning_content", "reasoning"]
            yield {"delta": dict.fromkeys(names, text)}

    def _end(self, is_whole: bool) -> tuple[()]:
        return ()

    def _call(self, **fields: Any) -> Choice:
        return {"delta": {"tool_calls": [{"index": len(self._calls) - 1, **fields}]}}


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
        body.conversation(body.messages, serving.pictures()),
        thinking_budget=body.thinking_token_budget,
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
            scored["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs, names)
        return reply.whole(answers) | scored

    return await whole_json(whole)
