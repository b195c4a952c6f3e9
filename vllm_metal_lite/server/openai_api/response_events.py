"""The response object of the Responses API, its output items, and the events that stream them.

An item is a message, thoughts or a call.  Deltas extend its text or the call's arguments.
"""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm_metal_lite.chat_formats.events import Event, Text
from vllm_metal_lite.server.blocks import Blocks
from vllm_metal_lite.server.errors import shown_error
from vllm_metal_lite.server.openai_api.response_tools import Callee, FreeformInput
from vllm_metal_lite.server.stream import event
from vllm_metal_lite.server.worker.messages import Delta, Position
from vllm_metal_lite.server.worker.request_state import RequestState

Logprobs = list[dict[str, Any]]


@dataclass(frozen=True)
class _ItemType:
    """How items of one type are streamed.

    text: the prefix of the text's events.  name: the field that holds the text.  If a part of the
    item holds the text: part is the prefix of the part's events, part_type its type, and parts the
    item's list of parts.
    """

    id_prefix: str
    text: str
    name: str
    part: str = ""
    part_type: str = ""
    parts: str = ""


_CONTENT = "response.content_part"
_MESSAGE = _ItemType("msg", "response.output_text", "text", _CONTENT, "output_text", "content")
_THOUGHTS = _ItemType(
    "rs", "response.reasoning_text", "text", _CONTENT, "reasoning_text", "content"
)
_PART, _TEXT = "response.reasoning_summary_part", "response.reasoning_summary_text"
_SUMMARY = _ItemType("rs", _TEXT, "text", _PART, "summary_text", "summary")
_CALL = _ItemType("fc", "response.function_call_arguments", "arguments")
_CUSTOM_CALL = _ItemType("ctc", "response.custom_tool_call_input", "input")


def _call(callee: Callee) -> tuple[_ItemType, dict[str, Any]]:
    """The item of a call at its beginning."""
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    fields: dict[str, Any] = {"call_id": call_id, "name": callee.name}
    if callee.namespace is not None:
        fields["namespace"] = callee.namespace
    if callee.kind == "custom":
        return _CUSTOM_CALL, {"type": "custom_tool_call", **fields, "input": ""}
    return _CALL, {"type": "function_call", **fields, "arguments": ""}


# The log-probabilities of positions as the API shows them.
LogprobsOf = Callable[[Iterable[Position]], Logprobs]


class ResponseReply(Blocks[bytes]):
    """The reply to a request, as output items; the last one may still grow.

    deltas: the answer.
    callees: the tools' names in the API, by the names that the model knows.
    with_summary: thoughts are shown as a summary, which clients show to users, and not as content.
    echo: fields of the response that repeat the request.
    scores: a function that gives the log-probabilities of tokens.
    items: the JSON of the items.
    """

    def __init__(
        self,
        request: RequestState,
        deltas: AsyncIterator[Delta],
        callees: Mapping[str, Callee],
        with_summary: bool,
        echo: Mapping[str, Any],
        scores: LogprobsOf,
    ) -> None:
        self._request, self._deltas, self._scores = request, deltas, scores
        self._callees, self._echo, self._numbers = callees, echo, count()
        self._thoughts = _SUMMARY if with_summary else _THOUGHTS
        self._suffix = request.request_id.removeprefix("resp_")  # the end of the items' ids
        self.items: list[dict[str, Any]] = []
        self._unshown: Logprobs = []
        self._created = int(time.time())
        self._num_reasoning_tokens, self._is_cut, self._is_broken = 0, False, False

    async def whole(self) -> dict[str, Any]:
        """The JSON of the response, at its end.  Raises ApiError if it has failed."""
        async for _ in self._news():
            pass
        return self._ended()

    def keep_alive(self) -> bytes:
        """An event without news.  Comments do not reset the timeouts of clients."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    async def stream(self) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self.keep_alive()
        try:
            async for news in self._news():
                yield news
            whole = self._ended()
            yield self._event(f"response.{whole['status']}", response=whole)
        except Exception as e:
            error = {"code": "server_error", "message": shown_error(e).message}
            failed = self._response("failed", error=error, usage=self._usage())
            yield self._event("response.failed", response=failed)

    async def _news(self) -> AsyncIterator[bytes]:
        async for delta in self._deltas:
            self._is_cut = delta.finish_reason == "length"
            self._num_reasoning_tokens += delta.num_reasoning_tokens
            self._unshown += self._scores(delta.logprobs or ())
            events = delta.events
            if self._unshown and delta.finish_reason is not None and self.kind == "text":
                events = [*events, Text("")]  # the last log-probabilities may have no text
            if news := b"".join(self.take(events)):
                yield news
        yield b"".join(self.close(not self._is_cut))

    def _ended(self) -> dict[str, Any]:
        return self._response(
            "incomplete" if self._is_cut or self._is_broken else "completed",
            output=self.items,
            usage=self._usage(),
            incomplete_details={"reason": "max_output_tokens"} if self._is_cut else None,
        )

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        done = status not in ("in_progress", "failed")
        return {
            "id": self._request.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if done else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._echo,
            **fields,
        }

    def _usage(self) -> dict[str, Any]:
        request = self._request
        num_input, num_output = len(request.prompt_token_ids), request.num_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": request.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event(kind, sequence_number=next(self._numbers), **fields)

    def _take(self, event: Event) -> Iterator[bytes]:
        yield from super()._take(event)
        self._unshown = []

    def _open(self, name: str) -> Iterator[bytes]:
        item_type, fields = _MESSAGE, {"type": "message", "role": "assistant", "content": []}
        if self.kind == "thoughts":
            item_type, fields = self._thoughts, {"type": "reasoning", "summary": []}
        elif self.kind == "call":
            item_type, fields = _call(self._callees[name])
        index = len(self.items)
        item_id = f"{item_type.id_prefix}_{self._suffix}_{index}"
        # The item that grows: its type, its texts and their log-probabilities, and the fields of
        # its events that tell its place.
        self._type, self._texts, self._logprobs = item_type, list[str](), list[Any]()
        self._input = FreeformInput() if item_type is _CUSTOM_CALL else None
        self._at: dict[str, Any] = {"item_id": item_id, "output_index": index}
        if item_type.parts:
            self._at["summary_index" if item_type is _SUMMARY else "content_index"] = 0
        item = {"id": item_id, **fields, "status": "in_progress"}
        self.items.append(item)
        yield self._event("response.output_item.added", output_index=index, item=item)
        if item_type.part:
            yield self._event(f"{item_type.part}.added", **self._at, part=self._part(""))

    def _grow(self, text: str) -> Iterator[bytes]:
        yield from self._add(text if self._input is None else self._input.feed(text))

    def _add(self, text: str) -> Iterator[bytes]:
        self._texts.append(text)
        scored = {"logprobs": self._unshown} if self._type is _MESSAGE else {}
        if text or any(scored.values()):
            self._logprobs += self._unshown
            yield self._event(f"{self._type.text}.delta", **self._at, delta=text, **scored)

    def _end(self, is_whole: bool) -> Iterator[bytes]:
        """Complete the item, and end its events.

        A client runs a call when its item is done.  A function call that was cut short fails,
        because its arguments are not JSON.  The input of a custom tool is any text, so its item is
        never done.
        """
        if self._input is not None:
            yield from self._add(self._input.close())
        item_type, item = self._type, self.items[-1]
        text = "".join(self._texts)
        item["status"] = "completed" if is_whole else "incomplete"
        if item_type.parts:
            item[item_type.parts] = [self._part(text)]
        else:
            item[item_type.name] = text
        if item_type is _CUSTOM_CALL and not is_whole:
            self._is_broken = True
            return
        done: dict[str, Any] = {**self._at, item_type.name: text}
        if item_type is _MESSAGE:
            done["logprobs"] = self._logprobs
        if item_type is _CALL:
            done["name"] = item["name"]
        yield self._event(f"{item_type.text}.done", **done)
        if item_type.part:
            yield self._event(f"{item_type.part}.done", **self._at, part=self._part(text))
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._type.part_type, "text": text}
        if self._type is _MESSAGE:
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part
