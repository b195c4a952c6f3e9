"""Runs one case of `bench` on an engine, and times its tokens."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.bench.cases import SETTLE_STEPS, BenchCase
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.sampling_params import SamplingParams

_FEWEST_STEPS = 4  # decode steps that give a speed


class Engine(Protocol):
    """An engine under test.  It decodes greedily and ignores the end of sequence."""

    name: str

    def begin(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Take the requests of a run, without cached prefixes of the last run."""

    def step(self) -> list[int]:
        """Do some work; returns the request's index for each new token."""

    def end(self) -> None:
        """Drop the requests that still run."""


@dataclass(frozen=True)
class Timing:
    """Of one run, or the medians of several.

    seconds_to_first: from the arrival to the first token, median of the requests.
    prompt_rate: prompt tokens a second until every request has its first token.
    decode_rate: new tokens a second while all requests decode; None if that was too short.
    """

    seconds_to_first: float
    prompt_rate: float
    decode_rate: float | None


def cache_limit() -> int:
    """Bytes of freed buffers that MLX keeps."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


class ThisEngine:
    """LLMEngine."""

    name = "ours"

    def __init__(self, engine: LLMEngine) -> None:
        self._engine, self._cache_limit = engine, cache_limit()

    def begin(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        mx.set_cache_limit(self._cache_limit)
        self._engine.reset_prefix_cache()
        self._seen = [0] * len(prompts)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self._engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

    def step(self) -> list[int]:
        new: list[int] = []
        for output in self._engine.step():
            i, count = int(output.request_id), len(output.outputs[0].token_ids)
            new += [i] * (count - self._seen[i])
            self._seen[i] = count
        return new

    def end(self) -> None:
        self._engine.abort([str(i) for i in range(len(self._seen))])


def drive(
    engine: Engine,
    prompts: Sequence[list[int]],
    new_tokens: int,
    max_tokens: int,
    stop: Callable[[], bool],
) -> list[list[float]]:
    """Times of each request's tokens, in seconds since all requests arrived.

    Ends when all requests have decoded SETTLE_STEPS + new_tokens together, or when `stop`, asked
    after each step, says so.
    """
    gc.collect()
    mx.synchronize()
    times: list[list[float]] = [[] for _ in prompts]
    wanted = SETTLE_STEPS + new_tokens
    together = 0  # steps since every request has its first token
    start = time.perf_counter()
    try:
        engine.begin(prompts, max_tokens)
        while together < wanted and not stop() and min(map(len, times)) < max_tokens:
            new = engine.step()
            now = time.perf_counter() - start
            together += bool(new) and all(times)
            for i in new:
                times[i].append(now)
    finally:
        engine.end()
    return times


def timing(case: BenchCase, times: Sequence[Sequence[float]]) -> Timing | None:
    """The timing of a run; None if a request did not get its first token."""
    if not all(times):
        return None
    last_first = max(t[0] for t in times)
    return Timing(
        statistics.median(t[0] for t in times), case.prompt_tokens / last_first, _decode_rate(times)
    )


def _decode_rate(times: Sequence[Sequence[float]]) -> float | None:
    """From SETTLE_STEPS after the last first token to the first end of a request."""
    last_first, end = max(t[0] for t in times), min(t[-1] for t in times)
    steps = sorted({t for request in times for t in request if last_first < t <= end})
    steps = steps[SETTLE_STEPS - 1 :]
    if len(steps) <= _FEWEST_STEPS:
        return None
    tokens = sum(steps[0] < t <= end for request in times for t in request)
    return tokens / (end - steps[0])


def medians(timings: Sequence[Timing]) -> Timing:
    decode_rates = [t.decode_rate for t in timings if t.decode_rate is not None]
    return Timing(
        statistics.median(t.seconds_to_first for t in timings),
        statistics.median(t.prompt_rate for t in timings),
        statistics.median(decode_rates) if decode_rates else None,
    )
