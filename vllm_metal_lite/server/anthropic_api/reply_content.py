"""The content of a message: blocks of text, thoughts and calls."""

import uuid
from collections.abc import Iterator
from typing import Any

from vllm_metal_lite.server.blocks import Blocks
from vllm_metal_lite.server.content import arguments_of
from vllm_metal_lite.server.stream import event

# By type of block: the type of its deltas, and the field of a delta that holds the text.
_DELTA_TYPES = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class ContentBlocks(Blocks[bytes]):
    """blocks: as in a reply that is not streamed; the last may be open."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open block

    def _open(self, name: str) -> Iterator[bytes]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self.kind == "thoughts":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif self.kind == "call":
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self._texts = []
        self.blocks.append(block)
        yield self._event("start", content_block=block)

    def _grow(self, text: str) -> Iterator[bytes]:
        self._texts.append(text)
        kind, name = _DELTA_TYPES[self.blocks[-1]["type"]]
        yield self._event("delta", delta={"type": kind, name: text})

    def _end(self, is_whole: bool) -> Iterator[bytes]:
        text, block = "".join(self._texts), self.blocks[-1]
        if self.kind == "call":
            block["input"] = arguments_of(text)
        else:
            block[block["type"]] = text
        if self.kind == "thoughts":  # clients want a signature, and check none
            yield self._event("delta", delta={"type": "signature_delta", "signature": ""})
        yield self._event("stop")

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event(f"content_block_{kind}", index=len(self.blocks) - 1, **fields)
