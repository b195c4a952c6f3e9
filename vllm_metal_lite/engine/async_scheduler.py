"""Scheduling one step ahead: the step after one whose tokens are not known yet.

Only a pure continuation is decided blindly: all that run decode, nobody else can join them, and
there are blocks for everybody.  Whose answer is sure to end for its length is left out; who ends
for another reason has a row for nothing, and its result is dropped.
"""

from vllm_metal_lite.engine.request import RequestStatus
from vllm_metal_lite.engine.scheduler import Scheduler, SchedulerOutput, Segment


class AsyncScheduler(Scheduler):
    """A Scheduler that can also schedule what follows a step before `update` of that step."""

    def schedule_ahead(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """The step after `output`, which is under way; None: its tokens must be known first.

        What `schedule` would decide after `update` if no answer of `output` ended but for its
        length.  To be followed by update(output), then publish_ahead.
        """
        running = RequestStatus.RUNNING
        decoding = [s.request for s in output.segments if s.request.status is running]
        if self._partials or len(decoding) != len(self._decodes):
            return None
        # The token under way may be a request's last.
        going = [r for r in decoding if len(r.token_ids) + 1 < r.max_length]
        if not going or self._may_admit(len(going)):
            return None
        block_size = self._block_size
        starts = [r.num_computed_tokens + 1 for r in going]
        need = [s == r.num_blocks * block_size for r, s in zip(going, starts, strict=True)]
        for request, start, needs_block in zip(going, starts, need, strict=True):
            if needs_block:
                # The step under way may still read it: writes of the next one come after.
                self.kv.give_back(request, start)
        if sum(need) > self.kv.num_available:
            return None
        out = SchedulerOutput()
        for request, start, needs_block in zip(going, starts, need, strict=True):
            new_blocks = self.kv.allocate(request, start, start + 1) if needs_block else ()
            out.segments.append(Segment(request, start, 1, new_blocks))
        out.num_decodes = out.total_num_scheduled_tokens = len(going)
        self._prefilled_last = False
        return out

    def publish_ahead(self, output: SchedulerOutput) -> None:
        """Name the blocks that a step from `schedule_ahead` completes, now that their tokens are
        known."""
        for segment in output.segments:
            end = segment.num_computed + 1
            if end % self._block_size == 0 and segment.request.status is RequestStatus.RUNNING:
                output.published += self.kv.publish(segment.request, end - 1, end)

    def _may_admit(self, num_going: int) -> bool:
        """Whether a waiting request might join a step of so many decodes."""
        config = self.config
        limit = min(config.max_num_seqs, config.max_num_batched_tokens)
        return bool(self._waiting) and num_going < limit and min(self._spare_blocks()) > 0
