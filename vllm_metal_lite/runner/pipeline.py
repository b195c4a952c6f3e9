"""Pipelined steps: each is launched before the previous step's tokens are known.

`InputBatch.pack` builds a ForwardBatch from the table.  `launch` passes the batch to the runner,
which prepares a DeviceBatch, runs the model and samples (StepResult).  `launch` does not wait: the
device works while the host continues.

The next batch may be packed at once.  `advance` writes UNKNOWN_TOKEN to the table in place of the
sampled tokens; the runner takes these tokens from the device.  `finish` waits for the tokens and
writes them to the table.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.runner.runner import Masks, ModelRunner

Scheduled = TypeVar("Scheduled")


@dataclass(eq=False, slots=True)
class StepInFlight(Generic[Scheduled]):
    """A step from its schedule until its tokens are read.

    scheduled: the caller's decision about the step, such as a SchedulerOutput.
    result: set by the launch; the tokens may not exist yet.
    is_advanced: whether the table has entries for the tokens.
    is_ahead: whether it was launched before the host waited for the previous step.
    """

    scheduled: Scheduled
    result: StepResult = field(init=False, repr=False)
    is_advanced: bool = False
    is_ahead: bool = False


class Pipeline(Generic[Scheduled]):
    """Runs the steps of one table, at most two in flight.  Independent of requests and schedulers.

    steps: in flight, oldest first.
    num_ahead: steps launched before the host waited for the previous step.
    """

    def __init__(self, runner: ModelRunner, inputs: InputBatch) -> None:
        self.runner, self.inputs = runner, inputs
        self.steps: deque[StepInFlight[Scheduled]] = deque()
        self.num_ahead = 0

    def begin(self, scheduled: Scheduled) -> None:
        """Add a step, which `launch` submits."""
        self.steps.append(StepInFlight(scheduled))

    def launch(
        self, batch: ForwardBatch, num_prompt_logprobs: int = 0, masks: Masks | None = None
    ) -> StepResult:
        """Submit the step that was begun.  If one is in flight, call `advance` first; this step may
        continue it.  If the launch fails, the caller takes the step out of `steps`."""
        after = self.steps[-2].result if len(self.steps) > 1 else None
        step, is_ahead = self.steps[-1], after is not None and not after.done
        result = self.runner.execute(batch, num_prompt_logprobs, masks, after)
        step.result, step.is_ahead = result, is_ahead
        self.num_ahead += is_ahead
        return result

    def advance(self) -> None:
        """Finish all steps but the last, and reserve table entries for the last step's tokens."""
        while len(self.steps) > 1:
            self.finish()
        if self.steps and not (step := self.steps[-1]).is_advanced:
            seats = step.result.batch.sampled_seats
            self.inputs.append_tokens(seats, np.full(len(seats), UNKNOWN_TOKEN, np.int32))
            step.is_advanced = True

    def finish(self) -> StepInFlight[Scheduled]:
        """Wait for the oldest step, which must be advanced, and fill in its tokens."""
        result = self.steps[0].result
        result.wait()
        seats, token_ids = result.batch.sampled_seats, result.token_ids
        if len(result.batch.draft_token_ids):
            for live in result.live_rows:
                drawn = token_ids[live.start : live.stop].tolist()
                self.inputs.replace_unknown(int(seats[live.start]), drawn)
        else:
            self.inputs.fill_tokens(seats, token_ids)
        return self.steps.popleft()

    def clear(self) -> None:
        """Forget the steps in flight; the caller removes their seats."""
        self.steps.clear()
