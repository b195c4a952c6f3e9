"""An answer's events in the form of chat completions: a message, or the chunks of a stream."""

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from json import dumps
from typing import Any

from vllm_metal_lite.chat_formats.events import Arguments, Event, Reasoning, Text, ToolCall
from vllm_metal_lite.server.deltas import Delta, Positions
from vllm_metal_lite.server.openai_api.reply import Reply, ending

# `chat_logprobs` in the form that a request asks for.
Scores = Callable[[list[int], Positions | None], dict[str, Any] | None]


async def whole_choices(
    reply: Reply, deltas: AsyncIterator[Delta], count: int, echoed: str, scores: Scores
) -> list[dict[str, Any]]:
    """The choices of a reply that is not streamed.  Raises ApiError if one has failed."""
    events: list[list[Event]] = [[] for _ in range(count)]
    choices: dict[int, dict[str, Any]] = {}
    async for delta in deltas:
        index = delta.choice
        reply.add_reasoning(delta.num_reasoning_tokens)
        events[index] += delta.events
        if delta.finish_reason is not None:
            choices[index] = {
                "index": index,
                "message": _message(events[index], echoed),
                "logprobs": scores(delta.answer.token_ids, delta.answer.logprobs),
                **ending(delta.answer, delta.finish_reason),
            }
    return [choices[index] for index in sorted(choices)]


def _message(events: Sequence[Event], echoed: str) -> dict[str, Any]:
    """The message of a whole answer."""
    content = echoed + "".join(event.text for event in events if isinstance(event, Text))
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thoughts := "".join(event.text for event in events if isinstance(event, Reasoning)):
        message |= {"reasoning_content": thoughts, "reasoning": thoughts}
    calls: list[dict[str, Any]] = []
    pieces: list[list[str]] = []  # of the arguments of each call
    for event in events:
        if isinstance(event, ToolCall):
            calls.append(call_head(event))
            pieces.append([])
        elif isinstance(event, Arguments):
            pieces[-1].append(event.text)
    if calls:
        for call, texts in zip(calls, pieces, strict=True):
            call["function"]["arguments"] = "".join(texts)
        message |= {"content": content or None, "tool_calls": calls}
    return message


def call_head(event: ToolCall) -> dict[str, Any]:
    """A call whose arguments are still to come."""
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return {"id": call_id, "type": "function", "function": {"name": event.name, "arguments": ""}}


async def chunks(
    reply: Reply, deltas: AsyncIterator[Delta], echoed: str, scores: Scores
) -> AsyncIterator[bytes]:
    """The chunks of all answers."""
    writers: dict[int, _ChunkWriter] = {}
    async for delta in deltas:
        index = delta.choice
        reply.add_reasoning(delta.num_reasoning_tokens)
        head = b""
        if index not in writers:
            writers[index] = _ChunkWriter()
            role = '"delta":{"role":"assistant","content":""}'
            head = reply.chunk(index, role, num_unshown=len(delta.token_ids))
            if echoed:
                delta.events.insert(0, Text(echoed))
        if chunk := head + writers[index].take(reply, delta, scores):
            yield chunk


class _ChunkWriter:
    """The chunks of one answer."""

    def __init__(self) -> None:
        self._num_calls = 0

    def take(self, reply: Reply, delta: Delta, scores: Scores) -> bytes:
        contents = [c for event in delta.events if (c := self._content(event)) is not None]
        has_ended = delta.finish_reason is not None
        logprobs = scores(delta.token_ids, delta.logprobs) if delta.token_ids else None
        if not contents:
            if not has_ended and not reply.sends_every_delta and logprobs is None:
                return b""
            contents = ['"delta":{"content":""}']
        end = ending(delta.answer, delta.finish_reason) if has_ended else None
        index, last = delta.choice, contents.pop()
        first = [reply.chunk(index, content) for content in contents]
        return b"".join([*first, reply.chunk(index, last, end, logprobs)])

    def _content(self, event: Event) -> str | None:
        """The encoded delta of an event; None: clients see nothing."""
        match event:
            case Text(text):
                return f'"delta":{{"content":{dumps(text)}}}'
            case Reasoning(text):
                encoded = dumps(text)
                return f'"delta":{{"reasoning_content":{encoded},"reasoning":{encoded}}}'
            case ToolCall():
                call = {"index": self._num_calls, **call_head(event)}
                self._num_calls += 1
                return f'"delta":{{"tool_calls":[{dumps(call)}]}}'
            case Arguments(text):
                call = {"index": self._num_calls - 1, "function": {"arguments": text}}
                return f'"delta":{{"tool_calls":[{dumps(call)}]}}'
        return None
