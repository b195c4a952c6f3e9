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
        if self._partials:
            return None
        out, needy = SchedulerOutput(), []
        num_decoding, running, block_size = 0, RequestStatus.RUNNING, self._block_size
        for segment in output.segments:
            request = segment.request
            if request.status is not running:
                continue
            num_decoding += 1
            # Else the token under way is its last.
            if len(request.token_ids) + 1 < request.max_length:
                start = request.num_computed_tokens + 1
                out.segments.append(ahead := Segment(request, start, 1, ()))
                if start == request.num_blocks * block_size:
                    needy.append(ahead)
        if num_decoding != len(self._decodes) or out.is_empty or self._may_admit(len(out.segments)):
            return None
        for ahead in needy:
            # The step under way may still read it: writes of the next one come after.
            self.kv.give_back(ahead.request, ahead.num_computed)
        if len(needy) > self.kv.num_available:
            return None
        for ahead in needy:
            start = ahead.num_computed
            ahead.new_block_ids = self.kv.allocate(ahead.request, start, start + 1)
        out.num_decodes = out.total_num_scheduled_tokens = len(out.segments)
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
