"""An answer's events as blocks of content: text, thoughts and calls, one after the other."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

from vllm_metal_lite.chat_formats.events import Arguments, Event, Reasoning, Text, ToolCall
from vllm_metal_lite.server.stream import encode, sse

# By type of block: the type of its deltas, and the field of a delta that holds the text.
_DELTA_TYPES = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def event(kind: str, **fields: Any) -> bytes:
    return sse(encode({"type": kind, **fields}), kind)


class ContentBlocks:
    """The blocks of one message.

    blocks: as in a reply that is not streamed; the last may be open.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open block
        self._kind = ""  # of the open block; "": none is open

    def take(self, news: Event) -> Iterator[bytes]:
        """An answer's event as events of the stream."""
        match news:
            case Text(text):
                yield from self._grow("text", text, {"text": ""})
            case Reasoning(text):
                yield from self._grow("thinking", text, {"thinking": "", "signature": ""})
            case ToolCall(name):
                block = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}
                yield from self._open("tool_use", block)
            case Arguments(text):
                yield self._delta(text)
            case _:
                yield from self.close()

    def close(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        kind, self._kind = self._kind, ""
        if not kind:
            return
        text, block, index = "".join(self._texts), self.blocks[-1], len(self.blocks) - 1
        if kind == "tool_use":
            block["input"] = _object(text)
        else:
            block[kind] = text
        if kind == "thinking":  # clients want a signature, and check none
            delta = {"type": "signature_delta", "signature": ""}
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)

    def _grow(self, kind: str, text: str, fields: dict[str, Any]) -> Iterator[bytes]:
        if self._kind != kind:
            yield from self._open(kind, fields)
        yield self._delta(text)

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[bytes]:
        yield from self.close()
        index, block = len(self.blocks), {"type": kind, **fields}
        self._kind, self._texts = kind, []
        self.blocks.append(block)
        yield event("content_block_start", index=index, content_block=block)

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        kind, name = _DELTA_TYPES[self._kind]
        delta = {"type": kind, name: text}
        return event("content_block_delta", index=len(self.blocks) - 1, delta=delta)


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call.  The API allows only objects.  Other text becomes a parameter that
    no tool has, so that the call fails."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
