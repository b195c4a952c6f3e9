"""Runs the cases of `bench` within a time limit: the engines in turns, each case several times."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli import log
from vllm_metal_lite.cli.bench.cases import SETTLE_STEPS, BenchCase
from vllm_metal_lite.cli.bench.engines import Engine
from vllm_metal_lite.errors import MetalLiteError, one_line

_FEWEST_STEPS = 4  # decode steps that give a speed
_WARM_UP_TOKENS = 128  # the most of the warm-up's prompt
_MOST_TURNS = 4  # of a case; the first is not counted if another follows
_CASE_SHARE = 1 / 40  # the share of the time limit after which a case gets no further turn


class Timing(NamedTuple):
    """The timing of one run, or the medians of several runs.

    seconds_to_first: from the arrival to the first token, median of the requests.
    prompt_rate: prompt tokens a second until every request has its first token.
    decode_rate: new tokens a second while all requests decode; None if that was too short.
    """

    seconds_to_first: float
    prompt_rate: float
    decode_rate: float | None


@dataclass(frozen=True)
class Result:
    """A case: the timing of each engine by its name, or in `skipped` why there is none.

    turns: run; the medians leave the first one out if there are others.  failed: an error is the
    reason in `skipped`.
    """

    case: BenchCase
    timings: dict[str, Timing] = field(default_factory=dict)
    turns: int = 0
    skipped: str | None = None
    failed: bool = False


@dataclass
class Suite:
    """tokens: the ids that prompts are drawn from.  new_tokens: of each request, counted.
    capacity: tokens that the KV store holds.  seconds: the time limit of `run`.
    """

    engines: Sequence[Engine]
    tokens: np.ndarray
    new_tokens: int
    capacity: int
    seconds: float
    results: list[Result] = field(init=False, default_factory=list)

    def run(self, cases: Sequence[BenchCase], stop: Callable[[], bool]) -> None:
        """Fill `results`; ends early if `stop`, asked between steps, says so.

        An engine's failure ends its case alone.  A failure of the warm-up raises MetalLiteError.
        """
        self._stop, self._random = stop, np.random.default_rng(0)
        self._deadline = time.perf_counter() + self.seconds
        shortest = min(case.context for case in cases)
        warm_up = cases[0]._replace(requests=1, context=min(_WARM_UP_TOKENS, shortest))
        self._turn(warm_up, "warm-up")
        for case in cases:
            if stop():
                break
            self.results.append(self._measure(case))
        log.clear()

    def _measure(self, case: BenchCase) -> Result:
        need = case.requests * (case.context + case.max_tokens)
        if need > self.capacity:
            why = f"needs K and V of {need:,} tokens, and the memory holds {self.capacity:,}"
            return Result(case, skipped=why)
        turns: list[dict[str, Timing]] = []
        now, last = time.perf_counter(), 0.0  # seconds of the last turn
        end = min(now + self.seconds * _CASE_SHARE, self._deadline)
        while len(turns) < _MOST_TURNS and (not turns or now + last < end):
            try:
                turn = self._turn(case, f"turn {len(turns) + 1}")
            except MetalLiteError as e:
                return Result(case, skipped=str(e), failed=True)
            if turn is None:
                break
            turns.append(turn)
            last = time.perf_counter() - now
            now += last
        if not turns:
            why = "stopped" if self._stop() else "did not end within the time limit"
            return Result(case, skipped=why)
        counted = turns[1:] or turns
        timings = {name: medians([turn[name] for turn in counted]) for name in turns[0]}
        return Result(case, timings, len(turns))

    def _is_over(self) -> bool:
        return time.perf_counter() > self._deadline or self._stop()

    def _turn(self, case: BenchCase, note: str) -> dict[str, Timing] | None:
        """Run every engine once, on the same prompts; None if stopped before the last result."""
        prompts = self._random.choice(self.tokens, (case.requests, case.context)).tolist()
        turn = {}
        for engine in self.engines:
            log.progress(f"{engine.name}: {case.requests} x {case.context:,} tokens, {note}")
            try:
                timing = drive(engine, prompts, self.new_tokens, case.max_tokens, self._is_over)
            except RuntimeError as e:  # MLX's error for everything
                raise MetalLiteError(f"{engine.name} fails: {one_line(e)}") from e
            if timing is None:
                return None
            turn[engine.name] = timing
        return turn


def drive(
    engine: Engine,
    prompts: Sequence[list[int]],
    new_tokens: int,
    max_tokens: int,
    stop: Callable[[], bool],
) -> Timing | None:
    """One run; None if a request did not get its first token.

    Ends when all requests have decoded SETTLE_STEPS + new_tokens together, when one of them may
    end, or when `stop`, asked before each step, says so.
    """
    gc.collect()
    mx.synchronize()
    first: dict[int, float] = {}  # seconds to the first token of each request
    counts = [0] * len(prompts)
    steps = 0  # since every request has its first token
    settled = now = 0.0
    tokens = 0  # since `settled`
    start = time.perf_counter()
    try:
        engine.begin(prompts, max_tokens)
        while not stop():
            together = len(first) == len(prompts)
            if together and (steps >= SETTLE_STEPS + new_tokens or max(counts) >= max_tokens):
                break
            new = engine.step()
            if not new:
                continue
            now = time.perf_counter() - start
            for i in new:
                first.setdefault(i, now)
                counts[i] += 1
            steps += together
            tokens += len(new)
            if steps <= SETTLE_STEPS:
                settled, tokens = now, 0
    finally:
        engine.end()
    if len(first) < len(prompts):
        return None
    rate = tokens / (now - settled) if steps >= SETTLE_STEPS + _FEWEST_STEPS else None
    return Timing(median(first.values()), sum(map(len, prompts)) / max(first.values()), rate)


def medians(timings: Sequence[Timing]) -> Timing:
    first, prompt_rates, decode_rates = zip(*timings, strict=True)
    known = [rate for rate in decode_rates if rate is not None]
    return Timing(median(first), median(prompt_rates), median(known) if known else None)
