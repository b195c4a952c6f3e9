"""Runs a load on an engine, and takes the times."""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.bench.lib.engines import Engine
from tools.bench.lib.loads import Load
from vllm_metal_lite.backend import mx


@dataclass
class Run:
    """One load on one engine.  Times are seconds since the run began; entries are by request.

    prompts: with the turns before.  reusable_tokens: prompt tokens that a perfect cache would hold,
    because they came before in the load.
    """

    arrived: list[float] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    cached_tokens: int = 0
    reusable_tokens: int = 0
    peak_bytes: int = 0


class _Arrivals:
    """The requests of a load that are still to come."""

    def __init__(self, load: Load, run: Run) -> None:
        self.run, self.limits = run, load.max_tokens
        self.waves = [w for w in load.waves if w.follows is None]
        self.turns = {i: f for i, f in enumerate(load.follows) if f is not None}
        self._latest = range(0)  # requests of the last wave that came

    def due(self) -> Iterator[range]:
        """The groups of requests that arrive together, as numbers, given the answers so far."""
        run = self.run
        if self.waves and all(len(run.tokens[i]) >= self.waves[0].after for i in self._latest):
            first = self._latest.stop
            self._latest = range(first, first + len(self.waves.pop(0).prompts))
            yield self._latest
        for i, before in list(self.turns.items()):
            if len(run.tokens[before]) == self.limits[before]:
                del self.turns[i]
                run.prompts[i] = run.prompts[before] + run.tokens[before] + run.prompts[i]
                yield range(i, i + 1)


def drive(engine: Engine, load: Load) -> Run:
    """Run a load to its end.  peak_bytes: without the weights, and without other engines."""
    gc.collect()
    engine.begin(load)
    mx.synchronize()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    prompts, limits = load.prompts, load.max_tokens
    run = Run([0.0] * len(prompts), [[] for _ in prompts], [[] for _ in prompts], prompts)
    arrivals = _Arrivals(load, run)
    started = time.perf_counter()
    pending: set[int] = set()  # requests that must end before the run ends
    while arrivals.waves or arrivals.turns or pending:
        for numbers in arrivals.due():
            if not load.ends_with_last_wave or not arrivals.waves:
                pending.update(numbers)
            for i in numbers:
                run.arrived[i] = time.perf_counter() - started
            new = slice(numbers.start, numbers.stop)
            engine.add(numbers.start, prompts[new], limits[new])
        tokens = engine.step()
        now = time.perf_counter() - started
        for i, token in tokens:
            run.tokens[i].append(token)
            run.times[i].append(now)
            if len(run.tokens[i]) == limits[i]:
                pending.discard(i)
    run.seconds = time.perf_counter() - started
    run.peak_bytes = mx.get_peak_memory() - active + engine.resident_bytes
    run.cached_tokens = engine.end()
    run.reusable_tokens = _reusable(load, run)
    return run


def _reusable(load: Load, run: Run) -> int:
    """Tokens of the turn before with its answer; shared tokens of all but the first request."""
    turns = [
        len(run.prompts[before]) + len(run.tokens[before])
        for before in load.follows
        if before is not None
    ]
    return sum(turns) + load.prefix_length * (len(load.prompts) - len(turns) - 1)
