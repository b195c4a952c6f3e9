"""Benchmarks: a load, the engines that run it, and how fast they were.

The engines are this one, and mlx-lm as its own programs drive it.  All decode greedily and ignore
the end of sequence.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import lt
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler import Scheduler

# isort: split
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step, wired_limit

mx = backend.mx

SETTLED = 8  # tokens of a request before its pace counts
_FEWEST_STEPS = 4  # a pace needs more steps than these
# The first runs of an engine on a load do not count: a variant of a step with prompts is compiled
# when it comes a second time.
WARM_UPS = 2

Tokens = list[tuple[int, int]]  # (number of the request in its load, token)
Metrics = dict[str, float]  # by name; times in seconds


def vocabulary(model: LoadedModel) -> np.ndarray:
    """Token ids that prompts are drawn from: special tokens are left out."""
    tokenizer, size = model.tokenizer, model.vocab_size
    if tokenizer is None:
        return np.arange(size)
    return np.setdiff1d(np.arange(min(len(tokenizer), size)), tokenizer.all_special_ids)


@dataclass
class Load:
    """Prompts that arrive together.

    max_tokens: the limit of each request's answer.  needed: the run ends when each request has this
    many tokens.
    prefix_length: how many tokens all prompts share, for engines whose API needs the number.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    needed: list[int]
    prefix_length: int = 0

    def arrivals(self, run: "Run") -> Iterator[list[range]]:
        """For each step, the groups of requests that arrive together before it, as numbers."""
        yield [range(len(self.prompts))]


@dataclass
class Run:
    """One load on one engine.  Times are seconds since the run began; entries are by request.

    prompts: the prompts with the turns before them.
    peak_bytes: the peak of the memory, without weights and without other engines.
    """

    arrived: list[float]
    times: list[list[float]]
    tokens: list[list[int]]
    prompts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    cached_tokens: int = 0
    peak_bytes: int = 0


def _cache_limit() -> int:
    """Bytes of freed buffers that MLX keeps."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


# mlx-lm's; read before an LLMEngine sets its own.  Freed buffers of prompts, whose sizes rarely
# repeat, would fill a GPU that other processes share.
MLX_CACHE_LIMIT = min(_cache_limit(), 16 << 30)


class ThisEngine:
    """This engine.  Every engine of a benchmark has these names and methods.

    params: fields of SamplingParams for all requests.
    kind: engines of one kind differ only by settings.
    resident_bytes: the memory that the engine holds between runs, without weights.
    """

    kind, resident_bytes = "ours", 0

    def __init__(
        self, engine: LLMEngine, name: str = "ours", params: dict[str, Any] | None = None
    ) -> None:
        self.engine, self.name, self._params = engine, name, params or {}
        self._limit = _cache_limit()

    def begin(self, load: Load) -> None:
        """Prepare for a run; nothing is left of the last one."""
        mx.set_cache_limit(self._limit)
        self.engine.reset_prefix_cache()
        self._shared = load.prefix_length
        self._cached: dict[int, int] = {}
        self._seen: dict[str, int] = {}

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        """Take requests number first, first + 1, ..."""
        for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True), first):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **self._params)
            # As mlx-lm's server is told where the system prompt ends.
            named = [self._shared] if 0 < self._shared <= len(prompt) else []
            self.engine.add_request(str(i), prompt, params, checkpoints=named)
            self._seen[str(i)] = 0

    def step(self) -> Tokens:
        """Do some work; returns the tokens that are new."""
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
        """Drop running requests; returns how many prompt tokens were found in a cache."""
        self.engine.abort(list(self._seen))
        return sum(self._cached.values())


# The copies that `native` has made.
_NATIVE: WeakKeyDictionary[PackedModel, nn.Module] = WeakKeyDictionary()


def native(model: LoadedModel) -> nn.Module:
    """A copy of a model's modules, which share the arrays, for mlx-lm.

    The first call must come before an engine joins the model's projections.
    """
    if backend.is_cpu():  # where nothing is joined
        return model.packed.model
    packed = model.packed
    if packed not in _NATIVE:
        _NATIVE[packed] = copy.deepcopy(packed.model)
    return _NATIVE[packed]


class MlxLm:
    """BatchGenerator, a new one for each run.  sizes: its options; by default those of
    `mlx_lm.server`, and all requests decode together."""

    name, kind, resident_bytes = "mlx-lm", "batches", 0

    def __init__(self, model: LoadedModel, **sizes: Any) -> None:
        self.model, self._sizes = native(model), sizes

    def begin(self, load: Load) -> None:
        mx.set_cache_limit(MLX_CACHE_LIMIT)
        sizes = {"completion_batch_size": len(load.prompts), **self._sizes}
        self._generator = BatchGenerator(self.model, **sizes)
        self._number: dict[int, int] = {}  # by mlx-lm's uid

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        uids = self._insert(prompts, max_tokens)
        self._number.update((uid, first + i) for i, uid in enumerate(uids))

    def _insert(self, prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        return self._generator.insert(prompts, max_tokens)

    def step(self) -> Tokens:
        return [(self._number[r.uid], int(r.token)) for r in self._generator.next()[1]]

    def end(self) -> int:
        self._generator.close()
        del self._generator  # it holds the caches
        return 0


class MlxLmSingle:
    """mlx-lm's generator for one sequence: no batch, no padding."""

    name, kind, resident_bytes = "mlx-lm generate_step", "single", 0

    def __init__(self, model: LoadedModel) -> None:
        self.model = native(model)

    def begin(self, load: Load) -> None:
        mx.set_cache_limit(MLX_CACHE_LIMIT)
        self._steps = self._generate(load.prompts[0], load.max_tokens[0])

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        """`begin` has the request."""

    def _generate(self, prompt: list[int], max_tokens: int) -> Generator[Tokens, None, None]:
        with wired_limit(self.model):
            for token, _ in generate_step(mx.array(prompt), self.model, max_tokens=max_tokens):
                yield [(0, int(token))]

    def step(self) -> Tokens:
        return next(self._steps)

    def end(self) -> int:
        self._steps.close()
        return 0


def mlx_lm(model: LoadedModel) -> Callable[[int], MlxLm | MlxLmSingle]:
    """Makes mlx-lm's engine for a number of requests.  Call this before an engine is made."""
    native(model)
    return lambda requests: MlxLmSingle(model) if requests == 1 else MlxLm(model)


Engine = ThisEngine | MlxLm | MlxLmSingle


def tokens_ahead(count: int, context: int, config: EngineConfig, limit: int) -> int:
    """How many tokens the first of `count` prompts has when the last one gets its first; at most
    `limit`."""
    # The window of one token needs few blocks, so that the store does not limit the answer.
    num_blocks = count * (config.max_num_batched_tokens // config.block_size + 2)
    config = replace(config, enable_prefix_caching=False)
    scheduler = Scheduler(config, [KVGroup(window=1, num_blocks=num_blocks)], context + limit + 1)
    queue = [Request(str(i), range(context), limit + 1) for i in range(count)]
    for request in queue:
        scheduler.add(request)
    # With more requests than tokens of a step, the last ones wait until others end.
    while queue[-1].num_tokens == context and queue[0].num_tokens < context + limit:
        step = scheduler.schedule()
        scheduler.advance(step)
        scheduler.update(step, [0] * len(step.terminal), {})
    return queue[0].num_tokens - context


def drive(engine: Engine, load: Load, stop: Callable[[], bool] = lambda: False) -> Run:
    """Run a load to its end, or until `stop`, asked before each step, says so."""
    gc.collect()
    engine.begin(load)
    mx.synchronize()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    prompts = list(load.prompts)
    run = Run([0.0] * len(prompts), [[] for _ in prompts], [[] for _ in prompts], prompts)
    arrivals = load.arrivals(run)
    started = time.perf_counter()
    try:
        while any(map(lt, map(len, run.tokens), load.needed)) and not stop():
            for numbers in next(arrivals, ()):
                for i in numbers:
                    run.arrived[i] = time.perf_counter() - started
                new = slice(numbers.start, numbers.stop)
                engine.add(numbers.start, prompts[new], load.max_tokens[new])
            tokens = engine.step()
            now = time.perf_counter() - started
            for i, token in tokens:
                run.tokens[i].append(token)
                run.times[i].append(now)
        run.seconds = time.perf_counter() - started
        run.peak_bytes = mx.get_peak_memory() - active + engine.resident_bytes
    finally:
        run.cached_tokens = engine.end()
    return run


def gaps(times: Sequence[float]) -> list[float]:
    return np.diff(times).tolist()


def firsts(run: Run) -> list[float]:
    """The time of each request from its arrival to its first token."""
    return [times[0] - at for times, at in zip(run.times, run.arrived, strict=True)]


def steady(run: Run) -> Metrics:
    """The pace while all requests decode, until the first one ends.  Empty if that is too short."""
    if min(map(len, run.times)) <= SETTLED:
        return {}
    start = max(times[SETTLED - 1] for times in run.times)
    end = min(times[-1] for times in run.times)
    stamps = sorted({t for times in run.times for t in times if start <= t <= end})
    if len(stamps) <= _FEWEST_STEPS:
        return {}
    tokens = sum(start < t <= end for times in run.times for t in times)
    return {
        "steady_tokens_per_s": tokens / (end - start),
        "steady_step_median": statistics.median(gaps(stamps)),
    }


def median_of(values: Sequence[Metrics]) -> Metrics:
    """The median of each metric that all of them have."""
    keys = [key for key in values[0] if all(key in v for v in values)]
    return {key: statistics.median(v[key] for v in values) for key in keys}


def ratio(ours: float | None, theirs: float | None, more: bool) -> float | None:
    """How many times better ours is; None if one of the two has no number.  more: whether a larger
    one is better."""
    if not ours or not theirs:
        return None
    return ours / theirs if more else theirs / ours
