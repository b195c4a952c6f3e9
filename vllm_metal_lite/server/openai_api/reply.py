"""The common parts of chat completions and completions: fields of requests, and replies."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from vllm_metal_lite import __version__
from vllm_metal_lite.server.errors import bad, error_event
from vllm_metal_lite.server.params import SamplingFields, Unsupported
from vllm_metal_lite.server.stream import DONE, encode, sse
from vllm_metal_lite.server.whole_json import encode_slowly
from vllm_metal_lite.server.worker.messages import Delta
from vllm_metal_lite.server.worker.request_state import RequestState


class StreamOptions(BaseModel):
    """include_usage: a last chunk has the usage.  continuous_usage_stats: every chunk has it, as
    every chunk of vLLM's."""

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
    guided_json: Unsupported = None  # vLLM's names before `structured_outputs`
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", " needs stream to be true")
        if self.stream and self.prompt_logprobs is not None:
            raise bad("prompt_logprobs", " is not supported with stream")

    def form(self) -> tuple[Any, str]:
        return self.response_format, "response_format"


_MANY = 64  # a chunk with more tokens has those of an echoed prompt, or its reader is slow
_FINGERPRINT = f"vllm-metal-lite-{__version__}"

Choice = dict[str, Any]  # the fields of a choice, or those of them that a chunk has


class ChoiceWriter(ABC):
    """Makes the choice of one answer.

    empty: the fields of a chunk without news.
    reports_reasoning: whether the usage counts tokens of thoughts.
    """

    empty: ClassVar[Choice]
    reports_reasoning: ClassVar = False

    @abstractmethod
    async def head(self) -> Choice | None:
        """The first chunk, which comes before the news; None: there is none."""

    @abstractmethod
    def news(self, delta: Delta) -> list[Choice]:
        """The next chunks."""

    @abstractmethod
    def scores(self, delta: Delta) -> dict[str, list[Any]] | None:
        """The log-probabilities of the delta's tokens, if the request asks for them."""

    @abstractmethod
    def whole(self, delta: Delta) -> Choice:
        """The Choice of an answer that is sent whole."""


class Reply:
    """The reply to a request of one or more prompts.

    requests: one for each prompt.  writers: one for each answer.
    kind: the field `object` of the reply, or of its chunks.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        requests: Sequence[RequestState],
        writers: Sequence[ChoiceWriter],
        options: StreamOptions | None,
    ) -> None:
        self._requests, self._writers = requests, writers
        self._num_tokens = self._num_reasoning_tokens = 0  # of all answers, so far
        self._begun: set[int] = set()  # choices whose head was sent
        self._common = {
            "id": requests[0].request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": _FINGERPRINT,
        }
        self._start = encode(self._common)[:-1]  # begins each chunk, so it is encoded once
        options = options or StreamOptions()
        self._with_usage = bool(options.include_usage)
        # Chunks without news too: special tokens and partial characters have no text.
        self._sends_every_delta = self._with_usage and bool(options.continuous_usage_stats)

    def whole(self, answers: Sequence[Delta]) -> dict[str, Any]:
        """The JSON of a reply that is not streamed."""
        choices = []
        for answer in answers:
            self._count(answer)
            fields = self._writers[answer.choice].whole(answer)
            choices.append({"index": answer.choice, **fields, **_ending(answer)})
        return {**self._common, "choices": choices, "usage": self._usage()}

    async def stream(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[bytes]:
        """Chunks, the usage if it is asked for, and the end; an error becomes an event."""
        try:
            async for delta in deltas:
                head = b"" if delta.choice in self._begun else await self._head(delta.choice)
                self._count(delta)
                if chunks := head + self._news(delta):
                    yield chunks
            if self._with_usage:
                yield sse(encode({**self._common, "choices": [], "usage": self._usage()}))
            yield DONE
        except Exception as e:
            yield error_event(e, "/v1/chat/completions")

    def _count(self, delta: Delta) -> None:
        self._num_tokens += len(delta.token_ids)
        self._num_reasoning_tokens += delta.num_reasoning_tokens

    async def _head(self, index: int) -> bytes:
        """The first chunk of a choice, before the news of its first delta."""
        self._begun.add(index)
        head = await self._writers[index].head()
        return b"" if head is None else self._chunk(index, head)

    def _news(self, delta: Delta) -> bytes:
        writer = self._writers[delta.choice]
        contents, scores = writer.news(delta), writer.scores(delta)
        has_scores = scores is not None and bool(delta.token_ids)
        has_ended = delta.finish_reason is not None
        if not contents and (has_ended or has_scores or self._sends_every_delta):
            contents = [writer.empty]
        if contents:
            end = _ending(delta) if has_ended else {}
            contents[-1] = {**contents[-1], "logprobs": scores, **end}
        return b"".join([self._chunk(delta.choice, content) for content in contents])

    def _chunk(self, index: int, content: Choice) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **content}
        news: dict[str, Any] = {"choices": [choice]}
        if self._with_usage:
            news["usage"] = self._usage() if self._sends_every_delta else None
        scores = choice["logprobs"]
        has_many = scores is not None and len(next(iter(scores.values()))) > _MANY
        text = encode_slowly(news) if has_many else encode(news)
        return sse(f"{self._start},{text[1:]}")

    def _usage(self) -> dict[str, Any]:
        """The tokens so far.  Each prompt counts once, whatever n is."""
        prompt = sum(len(g.prompt_token_ids) for g in self._requests)
        cached = sum(g.num_cached_tokens for g in self._requests)
        restored = sum(g.num_restored_tokens for g in self._requests)  # from the disk
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached, "restored_tokens": restored},
        }
        if self._writers[0].reports_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage


def _ending(delta: Delta) -> Choice:
    """How a choice has ended.  stop_reason: a field of vLLM's."""
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
