"""Runs the cases of `bench` within a time limit: the engines in turns, each case several times."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_metal_lite.cli import log
from vllm_metal_lite.cli.bench.cases import BenchCase
from vllm_metal_lite.cli.bench.timed_case import Engine, Timing, drive, medians, timing
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import MetalLiteError, one_line

_WARM_UP_TOKENS = 128  # the most of the warm-up's prompt
_MOST_TURNS = 4  # of a case; the first is not counted if another follows
_CASE_SHARE = 1 / 40  # the share of the time limit after which a case gets no further turn


class EngineFailed(MetalLiteError):
    """An engine raised in a run, as for lack of memory."""


@dataclass(frozen=True)
class Result:
    """A case: the timing of each engine by its name, or in `skipped` why there is none.

    counted: number of turns in the medians.  first: only the first turn was run, so the times may
    include compiling kernels.  failed: an error is the reason in `skipped`.
    """

    case: BenchCase
    timings: dict[str, Timing] = field(default_factory=dict)
    counted: int = 0
    first: bool = False
    skipped: str | None = None
    failed: bool = False


class Suite:
    """tokens: the ids that prompts are drawn from.  capacity: tokens that the KV store holds.

    seconds: the time limit of `run`.  stop: asked between steps whether the user wants to stop.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        tokens: np.ndarray,
        config: EngineConfig,
        capacity: int,
        seconds: float,
        stop: Callable[[], bool],
    ) -> None:
        self._engines, self._tokens, self._config = engines, tokens, config
        self._capacity, self._seconds, self._stop = capacity, seconds, stop
        self._random = np.random.default_rng(0)
        self.results: list[Result] = []

    def run(self, cases: Sequence[BenchCase], new_tokens: int) -> None:
        """Fill `results`; ends early if the user stops.

        An engine that fails spoils its case only; EngineFailed if that is the warm-up.
        """
        self._deadline = time.perf_counter() + self._seconds
        warm_up = BenchCase(1, min(_WARM_UP_TOKENS, *(case.context for case in cases)))
        self._turn(warm_up, new_tokens, "warm-up")
        for case in cases:
            if self._stop():
                break
            self.results.append(self._measure(case, new_tokens))
        log.clear()

    def _measure(self, case: BenchCase, new_tokens: int) -> Result:
        result = Result(case)
        need = case.requests * (case.context + case.max_tokens(new_tokens, self._config))
        left = self._deadline - time.perf_counter()
        if need > self._capacity:
            why = f"needs K and V of {need:,} tokens, and the memory holds {self._capacity:,}"
            return replace(result, skipped=why)
        turns: list[dict[str, Timing]] = []
        spent, longest = 0.0, 0.0
        while len(turns) < _MOST_TURNS and (
            not turns or spent + longest < min(self._seconds * _CASE_SHARE, left)
        ):
            start = time.perf_counter()
            try:
                turn = self._turn(case, new_tokens, f"turn {len(turns) + 1}")
            except EngineFailed as e:
                return replace(result, skipped=str(e), failed=True)
            if turn is None:
                break
            turns.append(turn)
            longest = time.perf_counter() - start
            spent += longest
        if not turns:
            why = "stopped" if self._stop() else "did not end within the time limit"
            return replace(result, skipped=why)
        counted = turns[1:] or turns
        timings = {name: medians([turn[name] for turn in counted]) for name in turns[0]}
        return replace(result, timings=timings, counted=len(counted), first=len(turns) == 1)

    def _is_over(self) -> bool:
        return time.perf_counter() > self._deadline or self._stop()

    def _turn(self, case: BenchCase, new_tokens: int, note: str) -> dict[str, Timing] | None:
        """Run every engine once, on the same prompts; None if stopped before the last result."""
        prompts = self._random.choice(self._tokens, (case.requests, case.context)).tolist()
        max_tokens = case.max_tokens(new_tokens, self._config)
        turn = {}
        for engine in self._engines:
            log.progress(f"{engine.name}: {case.requests} x {case.context:,} tokens, {note}")
            try:
                times = drive(engine, prompts, new_tokens, max_tokens, self._is_over)
            except RuntimeError as e:  # MLX's error for everything
                raise EngineFailed(f"{engine.name} fails: {one_line(e)}") from e
            result = timing(case, times)
            if result is None:
                return None
            turn[engine.name] = result
        return turn
