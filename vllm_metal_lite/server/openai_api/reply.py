"""What the replies of chat completions and of completions have in common."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from vllm_metal_lite import __version__
from vllm_metal_lite.outputs import CompletionOutput
from vllm_metal_lite.server.errors import check_ended, openai_shape, shown_error
from vllm_metal_lite.server.large_json import encode_slowly
from vllm_metal_lite.server.openai_api.completion_fields import StreamOptions
from vllm_metal_lite.server.stream import encode, sse
from vllm_metal_lite.server.worker.request_state import RequestState

_DONE = sse("[DONE]")
_MANY = 64  # a chunk with more tokens contains an echoed prompt
_FINGERPRINT = f"vllm-metal-lite-{__version__}"


class Reply:
    """The reply to a request of one or more prompts.

    requests: one for each prompt.  kind: `object` of the reply, or of its chunks.
    hides_answers: only prompts are shown, so usage counts no other tokens.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        requests: Sequence[RequestState],
        options: StreamOptions | None = None,
        hides_answers: bool = False,
    ) -> None:
        self._requests, self._hides_answers = requests, hides_answers
        self._num_reasoning_tokens: int | None = None
        self._common = {
            "id": requests[0].request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": _FINGERPRINT,
        }
        self._with_usage = bool(options and options.include_usage)
        # Chunks without news too: special tokens and partial characters have no text.
        self.sends_every_delta = self._with_usage and bool(
            options and options.continuous_usage_stats
        )
        self._head = encode(self._common)[:-1] + ',"choices":[{"index":'
        self._tail = ',"usage":null' if self._with_usage else ""

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The JSON of a reply that is not streamed."""
        return {**self._common, "choices": choices, "usage": self.usage()}

    def chunk(
        self,
        index: int,
        content: str,
        end: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
        num_unshown: int = 0,
    ) -> bytes:
        """An event with news of one choice.

        content: encoded fields of the choice.  end: from `ending`, in the last chunk of the choice.
        num_unshown: generated tokens that the next chunk will show.
        The constant part of the JSON is encoded once, because each token has a chunk.
        """
        scores = "null"
        if logprobs is not None:
            many = len(next(iter(logprobs.values())) or ()) > _MANY
            scores = encode_slowly(logprobs) if many else encode(logprobs)
        ended = '"finish_reason":null' if end is None else encode(end)[1:-1]
        usage = (
            f',"usage":{encode(self.usage(num_unshown))}' if self.sends_every_delta else self._tail
        )
        return sse(f'{self._head}{index},{content},"logprobs":{scores},{ended}}}]{usage}}}')

    async def stream(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Chunks, the usage if it is asked for, and the end; an error becomes an event."""
        try:
            async for chunk in chunks:
                yield chunk
            if self._with_usage:
                yield sse(encode({**self._common, "choices": [], "usage": self.usage()}))
        except Exception as e:
            yield sse(encode(openai_shape(shown_error(e))))
        yield _DONE

    def add_reasoning(self, num_tokens: int) -> None:
        """Count tokens of thoughts.  Without a call, the usage has no field for them."""
        self._num_reasoning_tokens = (self._num_reasoning_tokens or 0) + num_tokens

    def usage(self, num_unshown: int = 0) -> dict[str, Any]:
        """Tokens so far, without num_unshown of them.  Each prompt counts once, whatever n is."""
        prompt = sum(len(g.prompt_token_ids) for g in self._requests)
        generated = sum(g.num_tokens for g in self._requests) - num_unshown
        if self._hides_answers:
            generated = 0
        cached = sum(g.num_cached_tokens for g in self._requests)
        restored = sum(g.num_restored_tokens for g in self._requests)  # from the disk
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached, "restored_tokens": restored},
        }
        if self._num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage


def ending(answer: CompletionOutput, finish_reason: str | None) -> dict[str, Any]:
    """Fields of a choice that has ended.  stop_reason: a field of vLLM's.

    Raises ApiError if the answer has not ended by itself.
    """
    check_ended(answer)
    return {"finish_reason": finish_reason, "stop_reason": answer.stop_reason}
