"""mlx-lm as an engine of the serving benchmarks."""

import copy
from dataclasses import dataclass
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.benchmark import Load, MlxLm, Tokens
from vllm_metal_lite.model.loader import LoadedModel

# isort: split
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

mx = backend.mx


@dataclass(frozen=True)
class Settings:
    """Options of BatchGenerator: sizes of its two batches, most prompt tokens a pass.

    prefix: "none"; "server": prompt caches are found and kept as in mlx-lm's server; "once": the
    caller computes the shared beginning once and gives every request a copy of that cache.
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


class MlxLmServer(MlxLm):
    """mlx-lm, driven as its own server drives it, and with prompt caches for shared beginnings."""

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        s = self.settings = settings
        super().__init__(
            model,
            completion_batch_size=s.completion_batch_size,
            prefill_batch_size=s.prefill_batch_size,
            prefill_step_size=s.prefill_step_size,
        )
        self.name, self.kind = f"mlx-lm {settings}", f"prefix: {settings.prefix}"

    def begin(self, load: Load) -> None:
        super().begin(load)
        self._shared = load.prefix_length
        self._kept = LRUPromptCache(max_size=2 * len(load.prompts))  # enough for all prompts
        self._once: list[Any] | None = None
        self._cached = 0

    def _insert(self, prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        caches, cached = zip(*map(self._find, prompts), strict=True)
        return self._generator.insert_segments(
            [self._segments(p, n) for p, n in zip(prompts, cached, strict=True)],
            max_tokens,
            list(caches),
            [p[:n] for p, n in zip(prompts, cached, strict=True)],
        )

    def _find(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """A cache of the first tokens of a prompt, and their number."""
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
        # The server cuts after the system prompt, so that a cache can be kept from there.
        cut = max(self._shared, cached) if self.settings.prefix == "server" else cached
        return [prompt[cached:cut], prompt[cut:]]

    def step(self) -> Tokens:
        progress, responses = self._generator.next()
        if self.settings.prefix == "server":
            ends = [r.uid for r in progress if r.end_of_segment and not r.end_of_prompt]
            for cache, tokens in self._generator.extract_cache(ends).values():
                if len(tokens) == self._shared:  # and not one token before the prompt's end
                    self._kept.insert_cache(None, tokens[:], cache, cache_type="system")
            for r in responses:
                if r.finish_reason is not None:
                    self._kept.insert_cache(None, r.all_tokens[:], r.prompt_cache)
        return [(self._number[r.uid], int(r.token)) for r in responses]

    def end(self) -> int:
        super().end()
        del self._kept, self._once
        return self._cached
