"""A request as the server sees it: answers that grow, read by one coroutine.

Text is made here, in the server's process, so that the engine's process only runs steps.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.engine.detokenizer import Detokenizer, texts_of
from vllm_metal_lite.outputs import Logprob
from vllm_metal_lite.server.recent import Parted
from vllm_metal_lite.server.worker.messages import Add, AnswerUpdate, Scores, Update, unpack

Positions = list[dict[int, Logprob]]


class EngineLost(RuntimeError):
    """A step failed or the engine's process ended; the request has no further tokens."""

    code = "engine_lost"


class ShuttingDown(EngineLost):
    """The server stops, and ends the requests that still run."""

    code = "server_shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(slots=True)
class Delta:
    """What is new in an answer since the last Delta of it.

    logprobs: one entry for each of token_ids, if asked for.  At the end of the answer,
    `answer.finish_reason` is set; this Delta is its last.
    """

    answer: "Answer"
    text: str
    token_ids: list[int]
    logprobs: Positions | None


class Answer:
    """One of a request's `n` answers: everything so far, as in `CompletionOutput`."""

    def __init__(
        self,
        index: int,
        detokenizer: Callable[[list[int]], Detokenizer] | None,
        texts: Mapping[int, str],
    ) -> None:
        """texts: of each token, for log-probabilities."""
        self.index, self._texts = index, texts
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.logprobs: Positions | None = None
        # None: the engine finds stop strings, so the text comes from there.
        self._detokenizer = detokenizer and detokenizer(self.token_ids)
        self._text = ""
        self._num_read_tokens = self._num_read_characters = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return self._text if self._detokenizer is None else self._detokenizer.text()

    def take(self, update: AnswerUpdate) -> None:
        """Record what the engine reports."""
        self.token_ids += update.token_ids
        if update.text is not None:
            self._text += update.text
        if update.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += [unpack(scores, self._texts) for scores in update.logprobs]
        if update.finish_reason is not None:
            if self._detokenizer is not None and update.num_shown_tokens is not None:
                self._detokenizer.end_at(update.num_shown_tokens)
            self.stop_reason, self.error = update.stop_reason, update.error
            self.finish_reason = update.finish_reason

    def read(self) -> Delta:
        """What is new since the last call."""
        start, self._num_read_tokens = self._num_read_tokens, len(self.token_ids)
        text = self.text
        new = text[self._num_read_characters :]
        self._num_read_characters = len(text)
        logprobs = None if self.logprobs is None else self.logprobs[start:]
        return Delta(self, new, self.token_ids[start:], logprobs)


@dataclass
class Times:
    """Seconds of `time.monotonic`; None: not yet."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class Generation:
    """A request that the engine has accepted.

    `deltas` streams its answers; `complete` waits for all of them.  `EngineClient.generate`
    makes it, and ends the request when the caller leaves.

    on_update: called after each step that brought something, with the time.
    """

    def __init__(
        self,
        request: Add,
        tokenizer: TokenizerWrapper,
        on_update: Callable[["Generation", float], None] | None = None,
    ) -> None:
        self.request_id, self.params = request.request_id, request.params
        self.prompt_token_ids, self.turn = request.prompt_token_ids, request.turn
        self.num_cached_tokens = 0
        self._scored: list[Scores | None] | None = None  # the prompt
        self._texts = texts_of(tokenizer)
        self.parted: Parted | None = None
        self.finished = False
        self.times = Times()
        self._on_update = on_update
        params = request.params

        def detokenizer(token_ids: list[int]) -> Detokenizer:
            return Detokenizer(tokenizer, params, token_ids, request.prompt_token_ids)

        make = None if params.stop_strings else detokenizer
        self.answers = [Answer(i, make, self._texts) for i in range(params.n)]
        self._changed: dict[int, None] = {}  # indexes of answers, in order
        self._news = asyncio.Event()
        self._error: Exception | None = None

    @cached_property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Once the first token is there.  May take long: read it on a thread."""
        scored, texts = self._scored, self._texts
        if scored is None:
            return None
        return [None if scores is None else unpack(scores, texts) for scores in scored]

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def more_usage(self) -> dict[str, Any]:
        """Fields of `usage` that only this server has."""
        return {} if self.parted is None else self.parted.json()

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is new, whenever there is something.  A slow reader gets several tokens at once.

        Raises EngineLost.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            changed, self._changed = self._changed, {}
            for index in changed:
                yield self.answers[index].read()
            if self._error is not None:
                raise self._error
            if self.finished and not self._changed:
                return

    async def complete(self) -> list[Answer]:
        """All answers, finished.  Raises EngineLost."""
        while not self.finished:
            await self._news.wait()
            self._news.clear()
        if self._error is not None:
            raise self._error
        return self.answers

    # For EngineClient

    def take(self, update: Update) -> None:
        now = time.monotonic()
        if update.num_cached_tokens is not None:
            self.num_cached_tokens = update.num_cached_tokens
            self._scored = update.prompt_logprobs
            self.times.scheduled = update.scheduled_at
        for answer in update.answers:
            self.answers[answer.answer_index].take(answer)
            self._changed[answer.answer_index] = None
        if self.times.first_token is None and self.num_tokens:
            self.times.first_token = now
        if update.finished:
            self.finished, self.times.finished = True, now
        if self._on_update is not None:
            self._on_update(self, now)
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.finished = True
        self._news.set()
