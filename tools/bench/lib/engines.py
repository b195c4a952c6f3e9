"""The engines that the serving benchmarks compare, with one small interface, and the clock."""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tools.bench.lib.loads import Load
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams, backend
from vllm_metal_lite.cli.bench.engines import cache_limit
from vllm_metal_lite.model.loader import LoadedModel

mx = backend.mx

Tokens = list[tuple[int, int]]  # (number of the request in its load, token)


# Set before an LLMEngine sets its own limit.  Freed buffers of prompts, whose sizes rarely repeat,
# would fill a GPU that other processes share.
MLX_CACHE_LIMIT = min(cache_limit(), 16 << 30)


class Engine(Protocol):
    """name: for tables.  way: engines of one way differ by settings alone.
    resident_bytes: of what it holds between runs, the weights aside.
    """

    name: str
    way: str
    resident_bytes: int

    def begin(self, load: Load) -> None:
        """Prepare for a run; nothing is left of the last one."""

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        """Take requests number first, first + 1, ..."""

    def step(self) -> Tokens:
        """Do some work; returns the tokens that are new."""

    def end(self) -> int:
        """Drop running requests; returns how many prompt tokens were found in a cache."""


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
    pending: set[int] = set()  # of those that the run waits for
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


class ThisEngine:
    """LLMEngine, with a store that is large enough for the load and no larger.

    options: fields of EngineConfig.  params: of SamplingParams, for all requests.
    """

    def __init__(
        self,
        model: LoadedModel,
        load: Load,
        options: dict[str, Any] | None = None,
        name: str = "ours",
        params: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.way, self._params = name, "ours", params or {}
        block_size = (options or {}).get("block_size", EngineConfig.block_size)
        sizes = load.sizes
        config = {
            "max_num_seqs": len(sizes),
            "speculate": "off",  # random weights repeat themselves
            "max_model_len": min(load.longest, model.max_position),
            "num_blocks": sum(-(-size // block_size) for size in sizes) + 1,
            **(options or {}),
        }
        before = mx.get_active_memory()
        self.engine = LLMEngine(model, EngineConfig(**config))
        self.resident_bytes = mx.get_active_memory() - before
        self._limit = cache_limit()

    def begin(self, load: Load) -> None:
        mx.set_cache_limit(self._limit)
        self.engine.reset_prefix_cache()
        self._shared = load.prefix_length
        self._cached: dict[int, int] = {}
        self._seen: dict[str, int] = {}

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True), first):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **self._params)
            # As mlx-lm's server is told where the system prompt ends.
            named = [self._shared] if 0 < self._shared <= len(prompt) else []
            self.engine.add_request(str(i), prompt, params, checkpoints=named)
            self._seen[str(i)] = 0

    def step(self) -> Tokens:
        new: Tokens = []
        for output in self.engine.step():
            name, tokens = output.request_id, output.outputs[0].token_ids
            i, seen = int(name), self._seen[name]
            if not seen:
                self._cached[i] = output.num_cached_tokens
            new += [(i, token) for token in tokens[seen:]]
            self._seen[name] = len(tokens)
        return new

    def end(self) -> int:
        self.engine.abort(list(self._seen))
        return sum(self._cached.values())
