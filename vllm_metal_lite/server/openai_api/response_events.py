"""The response object of the Responses API, and the events that stream it."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from vllm_metal_lite.server.errors import check_ended, shown_error
from vllm_metal_lite.server.stream import sse
from vllm_metal_lite.server.worker.generation import Answer, Generation, Positions

_encode = json.JSONEncoder(separators=(",", ":")).encode

# logprobs of tokens as the API shows them.
Scores = Callable[[list[int], Positions | None], list[dict[str, Any]]]


class ResponseReply:
    """The reply to a request.

    echo: fields of the response that repeat the request.  scores: log-probabilities of tokens.
    """

    def __init__(self, generation: Generation, echo: Mapping[str, Any], scores: Scores) -> None:
        self._generation, self._echo, self._scores = generation, echo, scores
        self._created = int(time.time())
        self._item_id = f"msg_{generation.request_id.removeprefix('resp_')}"
        self._sequence_number = -1

    def whole(self) -> dict[str, Any]:
        """The JSON of a response that has ended.  Raises ApiError if it has failed."""
        (answer,) = self._generation.answers
        check_ended(answer)
        status = _status(answer)
        part = self._part(answer.text, self._scores(answer.token_ids, answer.logprobs))
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(
            status, [self._item(status, [part])], usage=self._usage(), incomplete_details=reason
        )

    def keep_alive(self) -> bytes:
        """An event that says that there is nothing new; clients do not count comments."""
        return self._event("response.in_progress", response=self._response("in_progress"))

    async def stream(self) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        try:
            async for event in self._news():
                yield event
            whole = self.whole()
            yield self._event(f"response.{whole['status']}", response=whole)
        except Exception as e:
            error = {"code": "server_error", "message": shown_error(e).message}
            failed = self._response("failed", error=error, usage=self._usage())
            yield self._event("response.failed", response=failed)

    async def _news(self) -> AsyncIterator[bytes]:
        at = {"output_index": 0, "content_index": 0, "item_id": self._item_id}
        item = self._item("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **at, part=self._part("", []))
        # There is a delta for each token: the constant part of its JSON is made once.
        kind = "response.output_text.delta"
        head = f"event: {kind}\ndata: " + _encode({"type": kind, **at})[:-1] + ',"sequence_number":'
        async for delta in self._generation.deltas():
            if delta.text or delta.logprobs:
                scores = _encode(self._scores(delta.token_ids, delta.logprobs))
                text, number = _encode(delta.text), self._next_number()
                yield f'{head}{number},"delta":{text},"logprobs":{scores}}}\n\n'.encode()
        (answer,) = self._generation.answers
        check_ended(answer)
        part = self._part(answer.text, self._scores(answer.token_ids, answer.logprobs))
        yield self._event(
            "response.output_text.done", **at, text=part["text"], logprobs=part["logprobs"]
        )
        yield self._event("response.content_part.done", **at, part=part)
        item = self._item(_status(answer), [part])
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._next_number()
        return sse(_encode({"type": kind, "sequence_number": number, **fields}), kind)

    def _next_number(self) -> int:
        self._sequence_number += 1
        return self._sequence_number

    def _response(
        self, status: str, output: list[dict[str, Any]] | None = None, **fields: Any
    ) -> dict[str, Any]:
        done = status not in ("in_progress", "failed")
        return {
            "id": self._generation.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if done else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output or [],
            "usage": None,
            **self._echo,
            **fields,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    @staticmethod
    def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        num_input, num_output = len(generation.prompt_token_ids), generation.num_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }  # fmt: skip


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
