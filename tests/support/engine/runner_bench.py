"""Steps of an engine's runner by hand, without a scheduler."""

import numpy as np

from tests.support.models import tiny_models as tiny
from vllm_metal_lite.sampling_params import SamplingParams

PROMPTS = tiny.prompts(2, 20, 20, seed=3)


class RunnerBench:
    """The parts of an engine.  Each prompt is a greedy request with a seat and eight blocks."""

    def __init__(self, prompts, num_blocks=32, name="llama"):
        engine = tiny.engine(name, attention="reference", num_blocks=num_blocks)
        self.runner, self.inputs, self.pipeline = (
            engine.runner,
            engine.in_flight.inputs,
            engine.in_flight.pipeline,
        )
        self.prompts, rows = prompts, []
        for i, prompt in enumerate(prompts):
            rows.append(self.inputs.add(prompt, len(prompt)))
            self.inputs.append_blocks(rows[-1], list(range(8 * i, 8 * i + 8)))
            tokens, greedy = np.array(prompt, np.int32), SamplingParams(temperature=0)
            engine.runner.sampler.add(rows[-1], greedy, 0, tokens, len(prompt), ())
        self.rows = np.array(rows)

    def step(self, which, computed, scheduled):
        batch = self.inputs.pack(self.rows[which], np.array(computed), np.array(scheduled))
        result = self.runner.execute(batch, 0)
        self.inputs.append_tokens(batch.sampled_seats, result.token_ids)
        return result
