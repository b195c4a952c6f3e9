"""This engine for the serving benchmarks, and the interface of all that they compare."""

from typing import Any, Protocol

from tools.bench.lib.loads import Load
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.bench.engines import cache_limit
from vllm_metal_lite.model.loader import LoadedModel

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
