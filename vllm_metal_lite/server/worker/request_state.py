"""A request as the server sees it: answers that grow, read by one coroutine.

Text is made here, in the server's process, so that the engine's process only runs steps.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.engine.detokenizer import Detokenizer, token_texts
from vllm_metal_lite.errors import NOT_FINITE
from vllm_metal_lite.outputs import CompletionOutput, Logprob
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.server.worker.messages import (
    Add,
    AnswerUpdate,
    EngineLost,
    PositionLogprobs,
    from_wire,
)


class ShuttingDown(EngineLost):
    """The server stops, and ends the requests that still run."""

    code = "server_shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass
class Times:
    """Seconds of `time.monotonic`; None: not yet."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class RequestState:
    """A request that the engine has accepted.

    `changes` tells which answers grow; `complete` waits for all of them.  `EngineClient.generate`
    makes it, and ends the request when the caller leaves.

    changed: indexes of answers that have grown, in order, until `changes` takes them.
    news: an event, set when `changed` has entries or the request has failed.

    on_update: called after each step with news, with the time.
    """

    def __init__(
        self,
        request: Add,
        tokenizer: TokenizerWrapper,
        on_update: Callable[["RequestState", float], None] | None = None,
    ) -> None:
        self.request_id, self.params = request.request_id, request.sampling
        self.prompt_token_ids, self.fair_round = request.prompt_token_ids, request.fair_round
        self.num_cached_tokens = self.num_restored_tokens = 0
        self.only_reads = isinstance(request.params, PoolingParams)
        self.pooled: np.ndarray | None = None  # the result of a finished pooling request
        self._scored: list[PositionLogprobs | None] | None = None  # the prompt
        self._text_of = token_texts(tokenizer)
        self.finished = False
        self.times = Times()
        self._on_update = on_update
        scores = self.params.logprobs is not None
        self.answers = [
            CompletionOutput(i, logprobs=[] if scores else None) for i in range(self.params.n)
        ]
        # None: the engine finds stop strings, so the text comes from there.
        self._detokenizers: list[Detokenizer] | None = None
        if not self.params.stop_strings and not self.only_reads:
            self._detokenizers = [
                Detokenizer(tokenizer, self.params, answer.token_ids, self.prompt_token_ids)
                for answer in self.answers
            ]
            for answer, detokenizer in zip(self.answers, self._detokenizers, strict=True):
                answer.text = detokenizer.text  # a method: text is made when read
        self.changed: dict[int, None] = {}
        self.news = asyncio.Event()
        self.error: Exception | None = None

    @cached_property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Once the first token is there.  May take long: read it on a thread."""
        scored, text_of = self._scored, self._text_of
        if scored is None:
            return None
        return [None if scores is None else from_wire(scores, text_of) for scores in scored]

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def not_finite(self) -> bool:
        """Whether the model's numbers were not finite."""
        if self.pooled is not None:
            return not np.isfinite(self.pooled).all()
        return any(NOT_FINITE in (answer.error or "") for answer in self.answers)

    async def complete(self) -> list[CompletionOutput]:
        """All answers, finished.  Raises EngineLost."""
        async for _ in changes([self]):
            pass
        return self.answers

    # For EngineClient

    def take(self, updates: list[AnswerUpdate]) -> None:
        """Record the news of a step."""
        now = time.monotonic()
        for update in updates:
            if update.num_cached_tokens is not None:
                self.num_cached_tokens = update.num_cached_tokens
                self.num_restored_tokens = update.num_restored_tokens
                self._scored = update.prompt_logprobs
                self.pooled = update.pooled
                self.times.scheduled = update.scheduled_at
            self._take(update)
            self.changed[update.answer_index] = None
        if self.times.first_token is None and (self.num_tokens or self.only_reads):
            self.times.first_token = now
        if all(answer.finished for answer in self.answers):
            self.finished, self.times.finished = True, now
        if self._on_update is not None:
            self._on_update(self, now)
        self.news.set()

    def _take(self, update: AnswerUpdate) -> None:
        answer = self.answers[update.answer_index]
        if not self.only_reads:
            answer.token_ids += update.token_ids
        if update.text is not None:
            answer.text += update.text
        if answer.logprobs is not None:
            answer.logprobs += [
                from_wire(scores, self._text_of) for scores in update.logprobs or ()
            ]
        if update.finish_reason is not None:
            if self._detokenizers is not None and update.num_shown_tokens is not None:
                self._detokenizers[update.answer_index].end_at(update.num_shown_tokens)
            answer.stop_reason, answer.error = update.stop_reason, update.error
            answer.finish_reason = update.finish_reason

    def fail(self, error: Exception) -> None:
        self.error = error
        self.finished = True
        self.news.set()


async def changes(requests: Sequence[RequestState]) -> AsyncIterator[int]:
    """Yield the index of each answer that has grown; indexes count the answers of all requests.

    A slow reader finds several new tokens at once.  Raises EngineLost.
    """
    news = asyncio.Event()
    news.set()
    for request in requests:
        request.news = news
    while True:
        await news.wait()
        news.clear()
        first = 0
        for request in requests:
            changed, request.changed = request.changed, {}
            for index in changed:
                yield first + index
            if request.error is not None:
                raise request.error
            first += len(request.answers)
        if all(g.finished and not g.changed and g.error is None for g in requests):
            return
