"""A request as the server sees it: its unread deltas, its counts and its times.

One coroutine reads the deltas.  The server makes their text, so that the engine's process only runs
steps.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.errors import NOT_FINITE
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.server.worker.messages import (
    Add,
    Delta,
    EngineLost,
    Position,
    add_delta,
    joined,
)


class ShuttingDown(EngineLost):
    """Ends a request that still runs when the server stops."""

    code = "server_shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass
class Times:
    """Times of a request, in seconds of `time.monotonic`; None until the event happens."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class RequestState:
    """A request that the engine has accepted.

    `EngineClient.generate` makes it, and ends the request when the caller leaves.

    unread: the deltas that no reader has taken, by answer.
    news: an event that is set when there are unread deltas or the request has failed.
    num_tokens_of, finish_reasons: one entry for each answer.  A reader may end an answer early.
    finished: whether the engine has ended all answers.
    only_reads: it is a pooling request, whose result is `pooled`.
    prompt_logprobs: one entry for each token of the prompt; None for the first token.
    not_finite: whether the model computed numbers that are not finite.
    on_update: a function that is called with the request and the time after each step with news.
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
        self.tokenizer = tokenizer
        self.prompt_logprobs: list[Position | None] | None = None
        self.pooled: np.ndarray | None = None
        self.not_finite = self.finished = False
        self.times = Times()
        self._on_update = on_update
        self.num_tokens_of = [0] * self.params.n
        self.finish_reasons: list[str | None] = [None] * self.params.n
        self._num_running = self.params.n
        self.unread: dict[int, list[Delta]] = {}
        self.news = asyncio.Event()
        self.error: Exception | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, of all answers."""
        return sum(self.num_tokens_of)

    async def complete(self) -> None:
        """Wait for the end.  Raises EngineLost."""
        while not self.finished:
            await self.news.wait()
            self.news.clear()
        if self.error is not None:
            raise self.error

    # EngineClient calls the methods below.

    def prefilled(
        self,
        scheduled_at: float | None,
        num_cached_tokens: int,
        num_restored_tokens: int,
        prompt_logprobs: list[Position | None] | None,
        pooled: np.ndarray | None,
    ) -> None:
        """Record the results of the prompt.  scheduled_at: when the first step was launched."""
        self.times.scheduled = scheduled_at
        self.num_cached_tokens, self.num_restored_tokens = num_cached_tokens, num_restored_tokens
        self.prompt_logprobs, self.pooled = prompt_logprobs, pooled
        self.not_finite = pooled is not None and not np.isfinite(pooled).all()

    def take(self, deltas: Sequence[Delta]) -> None:
        """Record the news of a step."""
        now = time.monotonic()
        for delta in deltas:
            add_delta(self.unread.setdefault(delta.choice, []), delta)
            if not self.only_reads:  # the engine samples a token that means nothing
                self.num_tokens_of[delta.choice] += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.finish_reasons[delta.choice] = delta.finish_reason
                self._num_running -= 1
                self.not_finite |= NOT_FINITE in (delta.error or "")
        if self.times.first_token is None and (self.num_tokens or self.only_reads):
            self.times.first_token = now
        if not self._num_running:
            self.finished, self.times.finished = True, now
        if self._on_update is not None:
            self._on_update(self, now)
        self.news.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.finished = True
        self.news.set()


async def news_of(requests: Sequence[RequestState]) -> AsyncIterator[tuple[RequestState, Delta]]:
    """Yield the unread deltas of all requests, as they come.

    A slow reader finds several new tokens at once.  Raises EngineLost.
    """
    news = asyncio.Event()
    news.set()
    for request in requests:
        request.news = news
    while True:
        await news.wait()
        news.clear()
        for request in requests:
            unread, request.unread = request.unread, {}
            for deltas in unread.values():
                yield request, joined(deltas)
            if request.error is not None:
                raise request.error
        if all(g.finished and not g.unread and g.error is None for g in requests):
            return
