"""The response object of the Responses API, and the events that stream it."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from vllm_metal_lite.chat_formats.events import Text
from vllm_metal_lite.server.deltas import Delta, Positions
from vllm_metal_lite.server.errors import shown_error
from vllm_metal_lite.server.openai_api.output_items import EventWriter, Logprobs, OutputItems
from vllm_metal_lite.server.openai_api.response_tools import Callee
from vllm_metal_lite.server.worker.request_state import RequestState

# logprobs of tokens as the API shows them.
LogprobsOf = Callable[[list[int], Positions | None], Logprobs]


class ResponseReply:
    """The reply to a request.

    deltas: the answer.  callees: by the names that the model knows.  with_summary: thoughts are
    shown as a summary, which clients show to users, and not as content.
    echo: fields of the response that repeat the request.  scores: log-probabilities of tokens.
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
        self._writer, self._echo = EventWriter(), echo
        suffix = request.request_id.removeprefix("resp_")
        self._output = OutputItems(self._writer, suffix, callees, with_summary)
        self._created = int(time.time())
        self._num_reasoning_tokens, self._is_cut = 0, False

    async def whole(self) -> dict[str, Any]:
        """The JSON of the response, at its end.  Raises ApiError if it has failed."""
        async for _ in self._news():
            pass
        return self._ended()

    def keep_alive(self) -> bytes:
        """An event without news.  Comments do not reset the timeouts of clients."""
        return self._writer.event("response.in_progress", response=self._response("in_progress"))

    async def stream(self) -> AsyncIterator[bytes]:
        event = self._writer.event
        yield event("response.created", response=self._response("in_progress"))
        yield self.keep_alive()
        try:
            async for news in self._news():
                yield news
            whole = self._ended()
            yield event(f"response.{whole['status']}", response=whole)
        except Exception as e:
            error = {"code": "server_error", "message": shown_error(e).message}
            failed = self._response("failed", error=error, usage=self._usage())
            yield event("response.failed", response=failed)

    async def _news(self) -> AsyncIterator[bytes]:
        output = self._output
        async for delta in self._deltas:
            self._is_cut = delta.finish_reason == "length"
            self._num_reasoning_tokens += delta.num_reasoning_tokens
            output.unshown += self._scores(delta.token_ids, delta.logprobs)
            events = delta.events
            if output.unshown and delta.finish_reason is not None and output.kind == "text":
                events = [*events, Text("")]  # the last log-probabilities may have no text
            if news := b"".join(output.take(events)):
                yield news
        yield b"".join(output.close(not self._is_cut))

    def _ended(self) -> dict[str, Any]:
        return self._response(
            "incomplete" if self._is_cut or self._output.is_broken else "completed",
            output=self._output.items,
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
