"""Runs the cases of `bench` within a time limit: the engines in turns, each case several times."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tqdm import tqdm

from vllm_metal_lite.cli.bench.cases import BenchCase
from vllm_metal_lite.cli.bench.timed_case import Engine, Timing, drive, medians, timing
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import MetalLiteError, one_line

_WARM_UP_TOKENS = 128  # the most of the warm-up's prompt
_MOST_TURNS = 4  # of a case; the first is not counted if another follows
_CASE_SHARE = 1 / 40  # the share of the time limit after which a case gets no further turn
_REFRESH_SECONDS = 0.2  # between updates of the progress bar


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

    def run(self, cases: Sequence[BenchCase], new_tokens: int, show_bar: bool) -> None:
        """Fill `results`; ends early if the user stops.

        An engine that fails spoils its case only; EngineFailed if that is the warm-up.
        """
        self._deadline = time.perf_counter() + self._seconds
        with tqdm(
            total=len(cases), unit="case", dynamic_ncols=True, disable=not show_bar
        ) as self._bar:
            warm_up = BenchCase(1, min(_WARM_UP_TOKENS, *(case.context for case in cases)))
            self._turn(warm_up, new_tokens, "warm-up")
            for case in cases:
                if self._stop():
                    return
                self.results.append(self._measure(case, new_tokens))
                self._bar.update()

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

    def _turn(self, case: BenchCase, new_tokens: int, note: str) -> dict[str, Timing] | None:
        """Run every engine once, on the same prompts; None if stopped before the last result."""
        prompts = self._random.choice(self._tokens, (case.requests, case.context)).tolist()
        max_tokens = case.max_tokens(new_tokens, self._config)
        turn = {}
        for engine in self._engines:
            what = f"{engine.name}: {case.requests} x {case.context:,} tokens, {note}"
            self._bar.set_description_str(what)
            shown = time.perf_counter()

            def stop() -> bool:
                nonlocal shown
                now = time.perf_counter()
                if now - shown > _REFRESH_SECONDS:
                    shown = now
                    self._bar.refresh()
                return now > self._deadline or self._stop()

            try:
                times = drive(engine, prompts, new_tokens, max_tokens, stop)
            except RuntimeError as e:  # MLX's error for everything
                raise EngineFailed(f"{engine.name} fails: {one_line(e)}") from e
            result = timing(case, times)
            if result is None:
                return None
            turn[engine.name] = result
        return turn
