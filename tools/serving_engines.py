"""The engines that the serving benchmarks compare, behind one small interface, and the clock.

mlx-lm is driven as its own server drives it: `BatchGenerator`, prompt caches for what is shared.
"""

import copy
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving_loads import Load

from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams, backend
from vllm_metal_lite.fusion.joined import Part
from vllm_metal_lite.model.loader import LoadedModel

# isort: split
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

mx = backend.mx

Tokens = list[tuple[int, int]]  # (number of the request in its load, token)


def _cache_limit() -> int:
    limit = mx.set_cache_limit(1 << 30)
    mx.set_cache_limit(limit)
    return limit


# Before any engine of ours lowers it.
_MLX_CACHE_LIMIT = _cache_limit()


class Engine(Protocol):
    """name: for tables.  way: engines of one way differ by settings alone.
    resident_bytes: of what it holds between runs, the weights aside.
    """

    name: str
    way: str
    resident_bytes: int

    def begin(self, load: Load) -> None:
        """Get ready for a run, with nothing remembered of the last one."""

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        """Take requests number first, first + 1, ..."""

    def step(self) -> Tokens:
        """Do some work; returns the tokens that are new."""

    def end(self) -> int:
        """Drop what still runs; returns how many prompt tokens were found in a cache."""


@dataclass
class Run:
    """One load on one engine.  Times are seconds since the run began; entries are by request.

    prompts: with the turns before.  reusable_tokens: prompt tokens that came before in the load, so
    that the best cache had them.
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
        """Numbers of requests that arrive together, by what has been answered."""
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
    """All of the turn before but its last token, and once computed what all share."""
    turns = [
        len(run.prompts[before]) + len(run.tokens[before]) - 1
        for before in load.follows if before is not None
    ]  # fmt: skip
    return sum(turns) + load.prefix_length * (len(load.prompts) - len(turns) - 1)


class Ours:
    """LLMEngine, with a store that is large enough for the load and no larger.

    options: fields of EngineConfig.  keep_prefixes: runs share one prefix cache.
    """

    def __init__(
        self,
        model: LoadedModel,
        load: Load,
        options: dict[str, Any] | None = None,
        name: str = "ours",
        keep_prefixes: bool = False,
    ) -> None:
        self.name, self.way, self.keep_prefixes = name, "ours", keep_prefixes
        block_size = (options or {}).get("block_size", EngineConfig.block_size)
        sizes = load.sizes
        config = {
            "max_num_seqs": len(sizes),
            "max_model_len": min(load.longest, model.max_position),
            "num_blocks": sum(-(-size // block_size) for size in sizes) + 1,
            **(options or {}),
        }
        before = mx.get_active_memory()
        self.engine = LLMEngine(model, EngineConfig(**config))
        self.resident_bytes = mx.get_active_memory() - before
        self._limit = _cache_limit()

    def begin(self, load: Load) -> None:
        mx.set_cache_limit(self._limit)
        if not self.keep_prefixes:
            self.engine.reset_prefix_cache()
        self._cached: dict[int, int] = {}
        self._seen: dict[str, int] = {}

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True), first):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
            self.engine.add_request(str(i), prompt, params)
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


@dataclass(frozen=True)
class Settings:
    """Of BatchGenerator: sizes of its two batches, most prompt tokens of a sequence in one pass.

    prefix: "none"; "server", prompt caches found and kept as mlx-lm's server does; or "once", the
    caller computes what all share once and gives every request a copy of that cache.
    """

    prefill_batch_size: int
    completion_batch_size: int
    prefill_step_size: int = 2048
    prefix: str = "none"

    def __str__(self) -> str:
        name = f"{self.prefill_batch_size}/{self.completion_batch_size}"
        if self.prefill_step_size != 2048:
            name += f", step {self.prefill_step_size}"
        return name if self.prefix == "none" else f"{name}, prefix: {self.prefix}"


_NATIVE: dict[int, nn.Module] = {}


def native(model: LoadedModel) -> nn.Module:
    """A model as mlx-lm has it: a copy with all projections apart, since our engine joins them."""
    ours = model.packed.model
    if backend.is_cpu():  # where nothing is joined
        return ours
    if id(model) not in _NATIVE:
        theirs = copy.deepcopy(ours)
        parts = [(path, m) for path, m in theirs.named_modules() if isinstance(m, Part)]
        theirs.update_modules(tree_unflatten([(path, part.separate()) for path, part in parts]))
        mx.eval(theirs.parameters())
        _NATIVE[id(model)] = theirs
    return _NATIVE[id(model)]


class MlxLm:
    """BatchGenerator, a new one for each run."""

    resident_bytes = 0

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self.model, self.settings = native(model), settings
        self.name, self.way = f"mlx-lm {settings}", f"prefix: {settings.prefix}"

    def begin(self, load: Load) -> None:
        mx.set_cache_limit(_MLX_CACHE_LIMIT)
        s = self.settings
        self._generator = BatchGenerator(
            self.model,
            completion_batch_size=s.completion_batch_size,
            prefill_batch_size=s.prefill_batch_size,
            prefill_step_size=s.prefill_step_size,
        )
        self._shared = load.prefix_length
        self._kept = LRUPromptCache(max_size=2 * len(load.prompts))  # all that can be asked for
        self._once: list[Any] | None = None
        self._number: dict[int, int] = {}  # by mlx-lm's uid
        self._cached = 0

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        caches, cached = zip(*map(self._find, prompts), strict=True)
        uids = self._generator.insert_segments(
            [self._segments(p, n) for p, n in zip(prompts, cached, strict=True)],
            max_tokens,
            list(caches),
            [p[:n] for p, n in zip(prompts, cached, strict=True)],
        )
        self._number.update((uid, first + i) for i, uid in enumerate(uids))

    def _find(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """A cache of the first tokens of a prompt, and how many they are."""
        if self.settings.prefix == "server":
            cache, rest = self._kept.fetch_nearest_cache(None, prompt)
            self._cached += len(prompt) - len(rest)
            return cache, len(prompt) - len(rest)
        if self.settings.prefix == "once":
            if self._once is None:
                self._once = self._compute(prompt[: self._shared])
            else:
                self._cached += self._shared
            return copy.deepcopy(self._once), self._shared
        return None, 0

    def _compute(self, tokens: list[int]) -> list[Any]:
        cache = make_prompt_cache(self.model)
        with mx.stream(self._generator.stream):
            for at in range(0, len(tokens), self.settings.prefill_step_size):
                part = tokens[at : at + self.settings.prefill_step_size]
                self.model(mx.array([part]), cache=cache)
                mx.eval([c.state for c in cache])
        return cache

    def _segments(self, prompt: list[int], cached: int) -> list[list[int]]:
        # The server cuts behind the system prompt, so that a cache can be kept from there.
        cut = max(self._shared, cached) if self.settings.prefix == "server" else cached
        return [prompt[cached:cut], prompt[cut:]]

    def step(self) -> Tokens:
        progress, responses = self._generator.next()
        if self.settings.prefix == "server":
            ends = [r.uid for r in progress if r.end_of_segment and not r.end_of_prompt]
            for cache, tokens in self._generator.extract_cache(ends).values():
                if len(tokens) == self._shared:  # and not one short of the prompt's end
                    self._kept.insert_cache(None, tokens[:], cache, cache_type="system")
            for r in responses:
                if r.finish_reason is not None:
                    self._kept.insert_cache(None, r.all_tokens[:], r.prompt_cache)
        return [(self._number[r.uid], int(r.token)) for r in responses]

    def end(self) -> int:
        self._generator.close()
        del self._generator, self._kept, self._once
        return self._cached


class MlxLmSingle:
    """mlx-lm's generator for one sequence: no batch, no padding."""

    name, way, resident_bytes = "mlx-lm generate_step", "single", 0

    def __init__(self, model: LoadedModel) -> None:
        self.model = native(model)

    def begin(self, load: Load) -> None:
        mx.set_cache_limit(_MLX_CACHE_LIMIT)

    def add(self, first: int, prompts: list[list[int]], max_tokens: list[int]) -> None:
        ((prompt,), (n,)) = prompts, max_tokens
        self._steps = generate_step(mx.array(prompt), self.model, max_tokens=n)

    def step(self) -> Tokens:
        token, _ = next(self._steps)
        return [(0, int(token))]

    def end(self) -> int:
        self._steps.close()
        return 0
