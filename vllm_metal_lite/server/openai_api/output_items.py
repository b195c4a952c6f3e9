"""The output items of a response, and the events that stream them.

An item is a message, thoughts or a call.  Deltas extend its text or the call's arguments.
"""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_metal_lite.chat_formats.events import Arguments, Event, Reasoning, Text, ToolCall
from vllm_metal_lite.server.openai_api.freeform import FreeformInput
from vllm_metal_lite.server.openai_api.response_tools import Callee
from vllm_metal_lite.server.stream import encode, sse

Logprobs = list[dict[str, Any]]


class EventWriter:
    """Encodes and numbers the events of a stream."""

    def __init__(self) -> None:
        self._sequence_number = -1

    def event(self, kind: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        number = self._sequence_number
        return sse(encode({"type": kind, "sequence_number": number, **fields}), kind)


@dataclass(frozen=True)
class _ItemType:
    """How items of one type are streamed.

    text: prefix of the text's events.  name: the field that holds the text.  If a part of the item
    holds the text: part, the prefix of the part's events; part_type; parts, the item's list.
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


class _Item:
    """An output item that grows.  fields: its JSON at the beginning."""

    def __init__(
        self,
        writer: EventWriter,
        item_type: _ItemType,
        suffix: str,
        index: int,
        fields: dict[str, Any],
    ) -> None:
        self.type, self.fields = item_type, {"id": f"{item_type.id_prefix}_{suffix}", **fields}
        self._writer, self._index, self._texts = writer, index, list[str]()
        self._at: dict[str, Any] = {"item_id": self.fields["id"], "output_index": index}
        if item_type.parts:
            self._at["summary_index" if item_type is _SUMMARY else "content_index"] = 0
        self._logprobs: Logprobs = []

    def open(self) -> Iterator[bytes]:
        event = self._writer.event
        yield event("response.output_item.added", output_index=self._index, item=self.fields)
        if self.type.part:
            yield event(f"{self.type.part}.added", **self._at, part=self._part(""))

    def grow(self, text: str, logprobs: Logprobs) -> Iterator[bytes]:
        self._texts.append(text)
        scored = {"logprobs": logprobs} if self.type is _MESSAGE else {}
        if text or any(scored.values()):
            self._logprobs += logprobs
            yield self._writer.event(f"{self.type.text}.delta", **self._at, delta=text, **scored)

    def close(self, status: str) -> Iterator[bytes]:
        """Complete `fields`, and end the item's events.

        A client runs a call when its item is done.  A function call that was cut short fails,
        because its arguments are not JSON.  The input of a custom tool is any text, so its item is
        never done.
        """
        item_type, event = self.type, self._writer.event
        text = "".join(self._texts)
        self.fields["status"] = status
        if item_type.parts:
            self.fields[item_type.parts] = [self._part(text)]
        else:
            self.fields[item_type.name] = text
        if self.is_broken:
            return
        done: dict[str, Any] = {**self._at, item_type.name: text}
        if item_type is _MESSAGE:
            done["logprobs"] = self._logprobs
        if item_type is _CALL:
            done["name"] = self.fields["name"]
        yield event(f"{item_type.text}.done", **done)
        if item_type.part:
            yield event(f"{item_type.part}.done", **self._at, part=self._part(text))
        yield event("response.output_item.done", output_index=self._index, item=self.fields)

    @property
    def is_broken(self) -> bool:
        """Whether no client may take the item as done."""
        return self.type is _CUSTOM_CALL and self.fields["status"] == "incomplete"

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.type.part_type, "text": text}
        if self.type is _MESSAGE:
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part


class OutputItems:
    """Events of an answer to items of a response.

    suffix: the end of the items' ids.  callees, with_summary: see ResponseReply.
    """

    def __init__(
        self, writer: EventWriter, suffix: str, callees: Mapping[str, Callee], with_summary: bool
    ) -> None:
        self._writer, self._suffix, self._callees = writer, suffix, callees
        self._thoughts = _SUMMARY if with_summary else _THOUGHTS
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._input: FreeformInput | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        return [item.fields for item in self._items]

    @property
    def is_saying(self) -> bool:
        """Whether a message grows."""
        return self._open is not None and self._open.type is _MESSAGE

    @property
    def is_broken(self) -> bool:
        """Whether the input of a custom tool was cut short."""
        return any(item.is_broken for item in self._items)

    def take(self, event: Event, logprobs: Logprobs) -> Iterator[bytes]:
        """logprobs: those of a Text's tokens."""
        match event:
            case Text(text):
                message = {"type": "message", "role": "assistant", "content": []}
                yield from self._grow(_MESSAGE, message, text, logprobs)
            case Reasoning(text):
                yield from self._grow(self._thoughts, {"type": "reasoning", "summary": []}, text)
            case ToolCall(name):
                yield from self._begin_call(self._callees[name])
            case Arguments(text):
                if self._open is not None:
                    new = text if self._input is None else self._input.feed(text)
                    yield from self._open.grow(new, [])
            case _:
                yield from self.close("completed" if event.is_whole else "incomplete")

    def close(self, status: str) -> Iterator[bytes]:
        """End the item that grows, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        if self._input is not None:
            yield from item.grow(self._input.close(), [])
            self._input = None
        yield from item.close(status)

    def _grow(
        self,
        item_type: _ItemType,
        fields: dict[str, Any],
        text: str,
        logprobs: Logprobs | None = None,
    ) -> Iterator[bytes]:
        if self._open is None or self._open.type is not item_type:
            yield from self._begin(item_type, fields)
        assert self._open is not None
        yield from self._open.grow(text, logprobs or [])

    def _begin_call(self, callee: Callee) -> Iterator[bytes]:
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        fields: dict[str, Any] = {"call_id": call_id, "name": callee.name}
        if callee.namespace is not None:
            fields["namespace"] = callee.namespace
        if callee.kind == "custom":
            fields = {"type": "custom_tool_call", **fields, "input": ""}
            yield from self._begin(_CUSTOM_CALL, fields)
            self._input = FreeformInput()
        else:
            yield from self._begin(_CALL, {"type": "function_call", **fields, "arguments": ""})

    def _begin(self, item_type: _ItemType, fields: dict[str, Any]) -> Iterator[bytes]:
        yield from self.close("completed")
        index = len(self._items)
        suffix = f"{self._suffix}_{index}"
        fields = {**fields, "status": "in_progress"}
        self._open = _Item(self._writer, item_type, suffix, index, fields)
        self._items.append(self._open)
        yield from self._open.open()
