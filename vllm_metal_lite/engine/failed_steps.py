"""Finds the requests that must end after a step failed: only the one at fault, if possible.

A failed step of several requests ends none of them at once: they return to the queue, and the
scheduler admits them one by one.  Each step then computes at most one prompt, the one at fault if
the step fails.
"""

import logging

from vllm_metal_lite.errors import one_line
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

# Failures in a row before all requests end.  More than one: each prompt of a step may be at fault.
MAX_FAILURES = 5


class FailedSteps:
    """at_fault: after a failure, the requests to end.  Knows nothing of answers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.at_fault: list[Request] = []
        self._scheduler = scheduler
        self._suspects: set[Request] = set()  # of failed steps, not computed again yet
        self._num_failures = 0

    @property
    def is_hopeless(self) -> bool:
        """MAX_FAILURES steps failed without a success between them: all requests must end."""
        return self._num_failures >= MAX_FAILURES

    def blame(self, output: SchedulerOutput, error: Exception) -> bool:
        """Find the requests at fault; call before the rollback.  Returns False if all had ended."""
        running = output.running
        if output.segments and not running:
            logger.warning(f"a step failed after its requests had ended: {one_line(error)}")
            return False
        self._note(error)
        if self._scheduler.one_by_one or len(running) == 1:
            prefills = output.segments[output.num_decodes :]
            # Not chunks of a decode: drafts, or tokens that its grammar forces.
            prompts = [s.request for s in prefills if s.is_prompt]
            # A prompt that has ended may be at fault, too: then no other request ends.
            self.at_fault = [r for r in prompts or running if r in running]
        else:
            self.at_fault = []
            self._suspects.update(running)
            self._scheduler.one_by_one = True
        return True

    def recording_failed(self, requests: list[Request], error: Exception) -> None:
        """requests: those of a step whose tokens could not all be recorded.  All end, even those
        with a recorded last token: nobody has seen it."""
        self._note(error)
        self.at_fault = requests

    def _note(self, error: Exception) -> None:
        """Count and log a failure.  The count restarts after all requests have ended.  The log may
        be the only place that shows the error."""
        self._num_failures = 1 if self.is_hopeless else self._num_failures + 1
        logger.warning(f"a step of the engine failed: {one_line(error)}")

    def succeeded(self, output: SchedulerOutput) -> None:
        """output: a step whose tokens are recorded."""
        self._num_failures = 0
        if self._scheduler.one_by_one:
            self._suspects.difference_update(output.terminal)
            self._suspects = {r for r in self._suspects if r.status is not RequestStatus.FINISHED}
            self._scheduler.one_by_one = bool(self._suspects)
