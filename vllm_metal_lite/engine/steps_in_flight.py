"""The steps in flight: launched one ahead, finished in order, and undone together if one fails."""

import time
from collections import deque
from functools import partial

from vllm_metal_lite.batch.pooling_table import PoolingTable
from vllm_metal_lite.engine.answer import Answer
from vllm_metal_lite.engine.constraints import Constraints
from vllm_metal_lite.engine.seats import Seats
from vllm_metal_lite.runner.pipeline import Pipeline
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.runner.runner import StatesLost
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


class StepsInFlight:
    """Runs scheduled steps, at most two at a time.

    answers: the unfinished ones, by the scheduler's request id.
    outputs: what the scheduler decided for each step in flight, oldest first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        seats: Seats,
        constraints: Constraints,
        pooling: PoolingTable,
        answers: dict[str, Answer],
    ) -> None:
        self._scheduler, self._pipeline, self._seats = scheduler, pipeline, seats
        self._constraints, self._pooling, self._answers = constraints, pooling, answers
        self.outputs: deque[SchedulerOutput] = deque()

    def launch(self, output: SchedulerOutput) -> None:
        """Submit a step; its requests may continue from tokens that the step in flight is still
        sampling."""
        for request in output.preempted:
            self._seats.remove(request)
        if output.is_empty:
            return
        output.launched_at = time.monotonic()
        self.outputs.append(output)
        for request in output.admitted:
            answer = self._answers[request.request_id]
            self._seats.add(answer)
            answer.report_cached()
        batch = self._seats.pack(output)
        batch = self._pooling.extend(batch, [s.request for s in output.segments])
        scored = 0
        if len(batch.prompt_targets):
            asked = (self._answers[s.request.request_id].params for s in output.segments)
            scored = max(params.prompt_logprobs or 0 for params in asked)
        requests = [output.segments[i].request for i in batch.sample_segments]
        masks = None
        if any(request in self._constraints for request in requests):
            masks = partial(self._masks, requests, batch.draft_token_ids.tolist())
        self._pipeline.launch(batch, scored, masks)

    def _masks(self, requests: list[Request], drafts: list[int]) -> TokenMasks | None:
        """The tokens that constraints allow in the rows of a step that is being launched."""
        if self._pipeline.steps:
            self._constraints.accept(self.outputs[0], self._pipeline.steps[0])
        return self._constraints.masks(requests, drafts)

    def advance(self) -> None:
        """Make room for the tokens of the oldest step; the next one can then be launched."""
        output = self.outputs[0]
        ended = self._scheduler.advance(output, self._constraints.take_forced())
        self._pipeline.advance()
        for request, token_ids in output.forced:
            self._constraints.accept_forced(request, token_ids)
            self._seats.force(self._answers[request.request_id], token_ids)
        for request in ended:
            self._seats.remove(request)

    def finish(self) -> tuple[SchedulerOutput, StepResult]:
        """Wait for the oldest step; a failure leaves it in flight."""
        result = self._pipeline.finish()
        self._constraints.accept(self.outputs[0], result)
        return self.outputs.popleft(), result

    def works(self, answer: Answer) -> bool:
        """Whether a step of this new request alone succeeds, or finds no room.  Nothing stays."""
        request, scheduler = answer.request, self._scheduler
        self._answers[request.request_id] = answer
        scheduler.add(request)
        scheduler.suspects[request] = 0
        try:
            output = scheduler.schedule_alone([request])
            self.launch(output)
            if not output.is_empty:
                self.advance()
                self.finish()
        except Exception as e:
            self.rollback()
            return isinstance(e, StatesLost)
        finally:
            scheduler.finish(request)
            self._seats.remove(request)
            del self._answers[request.request_id]
        return True

    def rollback(self) -> None:
        """Undo all steps; their requests return to the queue."""
        outputs = list(self.outputs)
        self.outputs.clear()
        self._pipeline.clear()
        self._pipeline.runner.forget()
        for output in outputs:
            for segment in output.segments:
                self._seats.remove(segment.request)
        self._scheduler.rollback(*outputs)
        self._constraints.rollback()
