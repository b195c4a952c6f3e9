"""The engines that `bench` measures: this one, and mlx-lm as its own programs drive it.

An engine decodes greedily and ignores the end of sequence.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step, wired_limit

from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.sampling_params import SamplingParams


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
        """Take the requests of a run, without cached prefixes of the last run."""
        mx.set_cache_limit(self._cache_limit)
        self._engine.reset_prefix_cache()
        self._seen = [0] * len(prompts)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self._engine.add_request(str(i), {"prompt_token_ids": prompt}, params)

    def step(self) -> list[int]:
        """Do some work; returns the request's index for each new token."""
        new: list[int] = []
        for output in self._engine.step():
            i, count = int(output.request_id), len(output.outputs[0].token_ids)
            new += [i] * (count - self._seen[i])
            self._seen[i] = count
        return new

    def end(self) -> None:
        """Drop the requests that still run."""
        self._engine.abort([str(i) for i in range(len(self._seen))])


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


Engine = ThisEngine | MlxLm
