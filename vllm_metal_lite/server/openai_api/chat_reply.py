"""An answer's events in the form of chat completions: a message, or the deltas of a stream."""

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from vllm_metal_lite.chat_formats.events import Event, Text
from vllm_metal_lite.server.blocks import Blocks
from vllm_metal_lite.server.deltas import Delta, Positions
from vllm_metal_lite.server.openai_api.reply import Scores, Writer

# `chat_logprobs` in the form that a request asks for.
ScoresOf = Callable[[list[int], Positions | None], Scores]


class ChatMessage(Blocks[dict[str, Any]]):
    """The message of an answer.  Its news are the deltas of a stream."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"text": [], "thoughts": []}
        self._calls: list[tuple[dict[str, Any], list[str]]] = []  # each with its arguments

    def _open(self, name: str) -> Iterator[dict[str, Any]]:
        if self.kind == "call":
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            function = {"name": name, "arguments": ""}
            self._calls.append(({"id": call_id, "type": "function", "function": function}, []))
            yield self._call(**self._calls[-1][0])

    def _grow(self, text: str) -> Iterator[dict[str, Any]]:
        if self.kind == "call":
            self._calls[-1][1].append(text)
            yield self._call(function={"arguments": text})
        else:
            self._texts[self.kind].append(text)
            is_text = self.kind == "text"
            yield {"content": text} if is_text else {"reasoning_content": text, "reasoning": text}

    def _end(self, is_whole: bool) -> tuple[()]:
        return ()

    def _call(self, **fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": len(self._calls) - 1, **fields}]}

    def whole(self) -> dict[str, Any]:
        content, thoughts = map("".join, self._texts.values())
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thoughts:
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        for call, arguments in self._calls:
            call["function"]["arguments"] = "".join(arguments)
        if self._calls:
            message |= {"content": content or None, "tool_calls": [call for call, _ in self._calls]}
        return message


class ChatWriter(Writer):
    """echoed: the text before the answer's.  may_call: the answer may have calls alone, and no
    content."""

    empty: ClassVar = {"delta": {}}
    reports_reasoning = True

    def __init__(self, echoed: str, scores_of: ScoresOf, may_call: bool = False) -> None:
        self.head = {"delta": {"role": "assistant", "content": None if may_call else ""}}
        self._message, self._scores_of = ChatMessage(), scores_of
        self._before: list[Event] = [Text(echoed)] if echoed else []

    async def take(self, delta: Delta) -> tuple[list[dict[str, Any]], Scores]:
        scores = self._scores_of(delta.token_ids, delta.logprobs) if delta.token_ids else None
        return [{"delta": news} for news in self._news(delta.events)], scores

    def whole(self, delta: Delta) -> dict[str, Any]:
        self._news(delta.events)
        scores = self._scores_of(delta.token_ids, delta.logprobs)
        return {"message": self._message.whole(), "logprobs": scores}

    def _news(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        before, self._before = self._before, []
        return self._message.take([*before, *events])
