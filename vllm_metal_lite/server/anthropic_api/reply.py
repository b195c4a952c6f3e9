"""The reply to a message: as a whole, or as events."""

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from vllm_metal_lite.server.blocks import Blocks
from vllm_metal_lite.server.content import arguments_of
from vllm_metal_lite.server.deltas import Delta
from vllm_metal_lite.server.errors import anthropic_shape, shown_error
from vllm_metal_lite.server.stream import encode, event, sse
from vllm_metal_lite.server.worker.request_state import RequestState

PING = event("ping")
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


class MessageReply:
    """The reply to a request."""

    def __init__(self, request: RequestState, deltas: AsyncIterator[Delta], model: str) -> None:
        self._request, self._deltas, self._model = request, deltas, model
        self._content = ContentBlocks()
        self._finish_reason: str | None = None

    async def whole(self) -> dict[str, Any]:
        """The JSON of the reply, at its end.  Raises ApiError if it has failed."""
        async for _ in self._news():
            pass
        return self._message(self._content.blocks, **self._ending())

    async def stream(self) -> AsyncIterator[bytes]:
        """The events.  The first counts the whole prompt as uncached, because the engine has not
        looked yet; `message_delta` has the right counts."""
        yield event("message_start", message=self._message([]))
        yield PING
        try:
            async for news in self._news():
                yield news
            yield event("message_delta", delta=self._ending(), usage=self._usage())
            yield event("message_stop")
        except Exception as e:
            yield sse(encode(anthropic_shape(shown_error(e))), "error")

    async def _news(self) -> AsyncIterator[bytes]:
        content = self._content
        async for delta in self._deltas:
            self._finish_reason = delta.finish_reason
            if news := b"".join(content.take(delta.events)):
                yield news
        yield b"".join(content.close())

    def _message(self, content: list[dict[str, Any]], **ending: str | None) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **ending,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """input_tokens excludes cached tokens, as in Anthropic's API."""
        request = self._request
        cached = request.num_cached_tokens
        return {
            "input_tokens": len(request.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": request.num_tokens,
        }

    def _ending(self) -> dict[str, Any]:
        (answer,) = self._request.answers
        reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
        reason = reasons.get(self._finish_reason or "")
        if reason is None and isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": reason or "end_turn", "stop_sequence": None}
