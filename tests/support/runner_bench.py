"""Steps of a runner by hand, over a given model and store."""

import numpy as np

from tests.support import tiny_models as tiny
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.runner.step_path import StepPath
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams

PROMPTS = tiny.prompts(2, 20, 20, seed=3)


class RunnerBench:
    """A runner with one request a prompt, greedy, with block tables filled in order."""

    def __init__(self, prompts, num_blocks=32, name="llama"):
        self.model = tiny.packed(name)
        store = PagedStore(
            self.model.packed.attention_specs,
            num_blocks,
            8,
            states=self.model.packed.state_store(4),
        )
        sampler = Sampler(4, self.model.vocab_size)
        self.runner = ModelRunner(self.model.packed, StepPath(ReferenceAttention(store)), sampler)
        self.inputs = InputBatch(4, 128, 8)
        self.rows = []
        for i, prompt in enumerate(prompts):
            row = self.inputs.add(prompt, len(prompt))
            self.inputs.append_blocks(row, list(range(8 * i, 8 * i + 8)))
            tokens = np.array(prompt, np.int32)
            sampler.add(row, SamplingParams(temperature=0), 0, tokens, len(prompt), ())
            self.rows.append(row)

    def step(self, which, computed, scheduled):
        rows = np.array([self.rows[i] for i in which])
        batch = self.inputs.pack(rows, np.array(computed), np.array(scheduled))
        result = self.runner.execute(batch, 0)
        self.inputs.append_tokens(batch.sampled_rows, result.token_ids)
        return result


def check_that_decodes_copy_less_than(bench: RunnerBench, limit: int) -> None:
    bench.step([0, 1], [0, 0], [20, 20])
    for i in range(3):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        bench.step([0, 1], [20 + i] * 2, [1, 1])
        assert mx.get_peak_memory() - before < limit
