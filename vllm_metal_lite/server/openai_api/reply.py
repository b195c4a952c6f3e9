"""The common parts of chat completions and completions: fields of requests, and replies."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from vllm_metal_lite import __version__
from vllm_metal_lite.server.deltas import Delta
from vllm_metal_lite.server.errors import bad, openai_shape, shown_error
from vllm_metal_lite.server.params import SamplingFields, Unsupported
from vllm_metal_lite.server.stream import encode, sse
from vllm_metal_lite.server.whole_json import encode_slowly
from vllm_metal_lite.server.worker.request_state import RequestState


class StreamOptions(BaseModel):
    """include_usage: a last chunk has the usage.  continuous_usage_stats: every chunk has it, as in
    vLLM."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionFields(SamplingFields):
    stream_options: StreamOptions | None = None
    n: Any = None
    max_tokens: Any = None
    prompt_logprobs: Any = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    truncate_prompt_tokens: Unsupported = None
    use_beam_search: Unsupported = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", " needs stream to be true")
        if self.stream and self.prompt_logprobs is not None:
            raise bad("prompt_logprobs", " is not supported with stream")

    def form(self) -> tuple[Any, str]:
        return self.response_format, "response_format"


_DONE = sse("[DONE]")
_MANY = 64  # a chunk with more tokens contains an echoed prompt
_FINGERPRINT = f"vllm-metal-lite-{__version__}"

Scores = dict[str, Any] | None  # `logprobs` of a choice


class ChoiceWriter(ABC):
    """Makes the choice of one answer.

    head: fields of the first chunk, which has no text; None: there is none, or it was sent.
    empty: fields of a chunk without text.
    reports_reasoning: whether the usage counts tokens of thoughts.
    """

    head: dict[str, Any] | None = None
    empty: ClassVar[dict[str, Any]]
    reports_reasoning: ClassVar = False

    @abstractmethod
    async def take(self, delta: Delta) -> tuple[list[dict[str, Any]], Scores]:
        """Fields of the next chunks, and the log-probabilities of the delta's tokens."""

    @abstractmethod
    def whole(self, delta: Delta) -> dict[str, Any]:
        """Fields of the choice of a whole answer."""


class Reply:
    """The reply to a request of one or more prompts.

    requests: one for each prompt.  writers: one for each answer.
    kind: `object` of the reply, or of its chunks.
    hides_answers: only prompts are shown, so usage counts no other tokens.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        requests: Sequence[RequestState],
        writers: Sequence[ChoiceWriter],
        options: StreamOptions | None = None,
        hides_answers: bool = False,
    ) -> None:
        self._requests, self._writers, self._hides_answers = requests, writers, hides_answers
        self._num_reasoning_tokens = 0
        self._common = {
            "id": requests[0].request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": _FINGERPRINT,
        }
        self._head = encode(self._common)[:-1]  # begins each chunk, so it is encoded once
        options = options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        # Chunks without news too: special tokens and partial characters have no text.
        self._sends_every_delta = self._with_usage and bool(options.continuous_usage_stats)

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The JSON of a reply that is not streamed.  deltas: all of each answer."""
        choices = []
        for delta in deltas:
            self._num_reasoning_tokens += delta.num_reasoning_tokens
            news = self._writers[delta.choice].whole(delta)
            choices.append({"index": delta.choice, **news, **_ending(delta)})
        return {**self._common, "choices": choices, "usage": self._usage()}

    async def stream(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[bytes]:
        """Chunks, the usage if it is asked for, and the end; an error becomes an event."""
        try:
            async for delta in deltas:
                self._num_reasoning_tokens += delta.num_reasoning_tokens
                if chunks := await self._chunks(delta):
                    yield chunks
            if self._with_usage:
                yield sse(encode({**self._common, "choices": [], "usage": self._usage()}))
        except Exception as e:
            yield sse(encode(openai_shape(shown_error(e))))
        yield _DONE

    async def _chunks(self, delta: Delta) -> bytes:
        writer, num_tokens = self._writers[delta.choice], len(delta.token_ids)
        head, writer.head = writer.head, None
        chunks = [] if head is None else [self._chunk(delta.choice, head, num_tokens)]
        contents, scores = await writer.take(delta)
        has_more = num_tokens and scores is not None
        has_ended = delta.finish_reason is not None
        if not contents and (has_ended or has_more or self._sends_every_delta):
            contents = [writer.empty]
        if contents:
            end = _ending(delta) if has_ended else {}
            contents[-1] = {**contents[-1], "logprobs": scores, **end}
        chunks += [self._chunk(delta.choice, content) for content in contents]
        return b"".join(chunks)

    def _chunk(self, index: int, content: dict[str, Any], num_unshown: int = 0) -> bytes:
        """num_unshown: tokens counted already whose text is in the next chunk."""
        choice = {"index": index, "logprobs": None, "finish_reason": None, **content}
        news: dict[str, Any] = {"choices": [choice]}
        if self._with_usage:
            news["usage"] = self._usage(num_unshown) if self._sends_every_delta else None
        scores = choice["logprobs"]
        has_many = scores is not None and len(next(iter(scores.values())) or ()) > _MANY
        text = encode_slowly(news) if has_many else encode(news)
        return sse(f"{self._head},{text[1:]}")

    def _usage(self, num_unshown: int = 0) -> dict[str, Any]:
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
        if self._writers[0].reports_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage


def _ending(delta: Delta) -> dict[str, Any]:
    """How a choice has ended.  stop_reason: a field of vLLM's."""
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.answer.stop_reason}
