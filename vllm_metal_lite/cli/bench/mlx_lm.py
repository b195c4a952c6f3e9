"""mlx-lm as an engine of `bench`: the same weights, driven as its own programs drive it."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step, wired_limit

from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.bench.timed_case import cache_limit


class MlxLm:
    """`generate_step` for one request; `BatchGenerator` with its defaults for several.

    The defaults are those of `mlx_lm.server`: 8 prompts are computed at a time, 2,048 tokens of
    each.  All requests decode together.
    """

    name = "mlx-lm"

    def __init__(self, model: nn.Module) -> None:
        """model: as loaded; make this object before an engine fuses layers of the model, and
        before an engine lowers MLX's cache limit."""
        # A copy of the modules: the arrays are shared.
        self._model = copy.deepcopy(model)
        self._cache_limit = cache_limit()

    def begin(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        mx.set_cache_limit(self._cache_limit)
        self._open = ExitStack()
        if len(prompts) == 1:
            self._open.enter_context(wired_limit(self._model))
            steps = generate_step(mx.array(prompts[0]), self._model, max_tokens=max_tokens)
            self._open.callback(steps.close)
            self._next = lambda: [0 for _ in [next(steps)]]
            return
        generator = BatchGenerator(self._model, completion_batch_size=len(prompts))
        self._open.callback(generator.close)
        uids = generator.insert(list(prompts), [max_tokens] * len(prompts))
        index = {uid: i for i, uid in enumerate(uids)}
        self._next = lambda: [index[response.uid] for response in generator.next()[1]]

    def step(self) -> list[int]:
        return self._next()

    def end(self) -> None:
        self._open.close()
        del self._next  # it holds the caches
