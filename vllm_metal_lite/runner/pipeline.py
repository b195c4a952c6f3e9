"""Steps one after another, each launched before the tokens of the one before are known.

The way of a batch: `InputBatch.pack` cuts a ForwardBatch out of the table.  `launch` gives it to
the runner, which prepares it for the attention (Step), runs the model on it (logits) and samples
(StepResult).  All of that is lazy: the device works, and the host goes on.

The next batch may be packed at once.  `advance` puts UNKNOWN_TOKEN in the table where the sampled
tokens belong; the runner finds these tokens on the device.  `finish` waits for them and fills them
in.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.sampling.masks import TokenMasks


@dataclass(slots=True)
class LaunchedStep:
    """req_indices: (T,) table rows of the terminal segments.  advanced: these rows have room."""

    batch: ForwardBatch
    req_indices: np.ndarray
    result: StepResult
    advanced: bool = False


class Pipeline:
    """Runs the steps of one table, two under way at most.  Knows neither requests nor schedulers.

    steps: those under way, the oldest first.  num_ahead: how many were launched before the host
    had waited for the one before.
    """

    def __init__(self, runner: ModelRunner, inputs: InputBatch) -> None:
        self.runner, self.inputs = runner, inputs
        self.steps: deque[LaunchedStep] = deque()
        self.num_ahead = 0

    def launch(
        self, batch: ForwardBatch, num_prompt_logprobs: int = 0, grammar: TokenMasks | None = None
    ) -> LaunchedStep:
        """Submit a step.  It may continue tokens of the last step launched, after `advance`."""
        after = self.steps[-1].result if self.steps else None
        is_ahead = after is not None and not after.done
        req_indices = batch.req_indices[batch.sample_segments]
        result = self.runner.execute(batch, req_indices, num_prompt_logprobs, grammar, after)
        self.num_ahead += is_ahead
        self.steps.append(LaunchedStep(batch, req_indices, result))
        return self.steps[-1]

    def advance(self) -> None:
        """Finish all steps but the last one, and make room in the table for the tokens of that."""
        while len(self.steps) > 1:
            self.finish()
        for step in self.steps:
            if not step.advanced:
                unknown = np.full(len(step.req_indices), UNKNOWN_TOKEN, np.int32)
                self.inputs.append_tokens(step.req_indices, unknown)
                step.advanced = True

    def finish(self) -> LaunchedStep:
        """Wait for the oldest step, which has been advanced, and fill in its tokens."""
        step = self.steps[0]
        step.result.wait()
        self.inputs.fill_tokens(step.req_indices, step.result.token_ids)
        return self.steps.popleft()

    def clear(self) -> None:
        """Drop the steps under way: nobody wants their tokens."""
        self.steps.clear()
