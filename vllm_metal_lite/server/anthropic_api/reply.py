"""The reply to a message: as a whole, or as events."""

import json
from collections.abc import AsyncIterator
from typing import Any

from vllm_metal_lite.server.errors import anthropic_shape, check_ended, shown_error
from vllm_metal_lite.server.stream import sse
from vllm_metal_lite.server.worker.generation import Answer, Generation

_encode = json.JSONEncoder(separators=(",", ":")).encode


def _event(kind: str, **fields: Any) -> bytes:
    return sse(_encode({"type": kind, **fields}), kind)


PING = _event("ping")
_BLOCK_START = _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
_BLOCK_STOP = _event("content_block_stop", index=0)
# There is a delta for each token: the constant part of its JSON is made once.
_DELTA = (
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    '"delta":{"type":"text_delta","text":'
)


class MessageReply:
    """The reply of one text block to a request."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation, self._model = generation, model

    def whole(self) -> dict[str, Any]:
        """The JSON of a reply that is not streamed.  Raises ApiError if it has failed."""
        (answer,) = self._generation.answers
        content = [{"type": "text", "text": answer.text}]
        return self._message(content, **self._ending(answer))

    async def stream(self) -> AsyncIterator[bytes]:
        """The first event counts the whole prompt as uncached, since it comes before the engine
        has looked; the counts of the last but one event are right."""
        yield _event("message_start", message=self._message([]))
        yield _BLOCK_START
        yield PING
        try:
            async for delta in self._generation.deltas():
                if delta.text:
                    yield f"{_DELTA}{_encode(delta.text)}}}}}\n\n".encode()
            (answer,) = self._generation.answers
            ending = self._ending(answer)
            yield _BLOCK_STOP
            yield _event("message_delta", delta=ending, usage=self._usage())
            yield _event("message_stop")
        except Exception as e:
            yield sse(_encode(anthropic_shape(shown_error(e))), "error")

    def _message(
        self,
        content: list[dict[str, Any]],
        stop_reason: str | None = None,
        stop_sequence: str | None = None,
    ) -> dict[str, Any]:
        return {
            "id": self._generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """input_tokens counts those that were computed, as in Anthropic's API."""
        generation = self._generation
        cached = generation.num_cached_tokens
        return {
            "input_tokens": len(generation.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_tokens,
        }

    @staticmethod
    def _ending(answer: Answer) -> dict[str, Any]:
        check_ended(answer)
        if answer.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}
