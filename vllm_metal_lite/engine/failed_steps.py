"""Finds the request that must end after a step failed, so that no other request ends.

The first failure ends no request.  The requests of all steps in flight return to the queue as
suspects.  While there are suspects, a step holds one of them alone, and no step is launched ahead.
A suspect whose step fails then is at fault.  A suspect is cleared once it has computed more tokens
than with the failed step: so it must also pass a decode if it failed when it decoded.

Five failures in a row may come from a lost device or from a crowd of bad requests.  A step of one
token decides: all requests end only if this step fails, too.
"""

import logging
from collections.abc import Collection
from weakref import WeakKeyDictionary

from vllm_metal_lite.errors import one_line, shorten
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

# Failures in a row before a step of one token decides.
MAX_FAILURES = 5


class FailedSteps:
    """at_fault: the requests that must end.  num_failures: how many steps in a row have failed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.at_fault: list[Request] = []
        self._scheduler = scheduler
        self.num_failures = 0
        # How often a step of a request has failed without showing the request at fault.
        self._num_suspected: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    @property
    def is_hopeless(self) -> bool:
        """MAX_FAILURES steps failed without a success between them: all requests must end."""
        return self.num_failures >= MAX_FAILURES

    def blame(self, outputs: Collection[SchedulerOutput], error: Exception) -> bool:
        """Find the request at fault; call before the rollback.  outputs: the steps in flight.
        Returns False if all requests of one of them had ended: that step may be at fault."""
        if not all(output.running for output in outputs):
            logger.warning(f"a step failed after its requests had ended: {one_line(error)}")
            return False
        ends = {s.request: s.end for output in outputs for s in output.segments}
        running = [r for r in ends if r.status is RequestStatus.RUNNING]
        suspects = self._scheduler.suspects
        # A request that has ended may be at fault, too: then no other request ends.
        self.at_fault = [r for r in running if len(ends) == 1 and r in suspects]
        self._note(error)
        if not self.at_fault:
            for request in running:
                # Each time longer, since these requests may fail only together.
                times = self._num_suspected.get(request, 0)
                suspects[request] = ends[request] + 2**times - 1
                self._num_suspected[request] = times + 1
        return True

    def recording_failed(self, requests: list[Request], error: Exception) -> None:
        """requests: those of a step whose tokens could not all be recorded.  All end, even those
        with a recorded last token: nobody has seen it."""
        self.at_fault = requests
        self._note(error)

    def _note(self, error: Exception) -> None:
        """Count and log a failure.  The count restarts after all requests have ended.  The log may
        be the only place that shows the error."""
        self.num_failures = 1 if self.is_hopeless else self.num_failures + 1
        names = ", ".join(dict.fromkeys(request.parent_id for request in self.at_fault))
        ended = f" and ends {shorten(names)}" if names else ""
        logger.warning(f"a step of the engine failed{ended}: {one_line(error)}")

    def succeeded(self, output: SchedulerOutput) -> None:
        """output: a step whose tokens are recorded."""
        self.num_failures = 0
        if suspects := self._scheduler.suspects:
            for segment in output.segments:
                if segment.end > suspects.get(segment.request, segment.end):
                    del suspects[segment.request]
