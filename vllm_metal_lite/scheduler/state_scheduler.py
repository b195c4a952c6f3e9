"""Decides for recurrent layers: the state slots of each segment, which states are kept, and which
requests wait for a state that another request is about to leave.
"""

from collections.abc import Sequence

from vllm_metal_lite.batch.forward_batch import SegmentState
from vllm_metal_lite.scheduler.checkpoints import add_planned
from vllm_metal_lite.scheduler.following import MAX_FOLLOWED, find_leader, is_ahead
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import Checkpoint, SchedulerOutput
from vllm_metal_lite.scheduler.state_slots import StateSlots


class StateScheduler:
    """The states of all requests."""

    def __init__(self, kv: KVCacheManager, states: StateSlots) -> None:
        self.kv, self.states = kv, states

    # Segments

    def decode(self, request: Request, start: int, out: SchedulerOutput) -> SegmentState:
        """The state slots of a decode.  The state at a block's end is kept: the next turn of a
        conversation starts there, if the answer ends before another block does."""
        state = self.states.next_segment(request)
        if (start + 1) % self.kv.block_size == 0 and self.kv.enable_caching:
            out.checkpoints.append(Checkpoint(request, state.final, start + 1, rolling=True))
        return state

    def slots_of_chunk(self, request: Request, end: int, out: SchedulerOutput) -> SegmentState:
        """The state slots of a chunk that ends at `end`, with its planned checkpoints."""
        if request not in out.admitted:
            self.states.next_segment(request)
        state = request.state
        assert state is not None, "a running request has a state"
        while request.planned and request.planned[0].position <= end:
            position, *kind = request.planned.pop(0)
            slot = state.final if position == end else self.states.reserve()
            if slot is not None:
                if position < end:
                    state.checkpoints.append((position, slot))
                out.checkpoints.append(Checkpoint(request, slot, position, *kind))
        if end == request.num_tokens and end % self.kv.block_size == 0 and self.kv.enable_caching:
            # The next turn starts behind the whole prompt, unless the answer completes a block.
            out.checkpoints.append(Checkpoint(request, state.final, end, rolling=True))
        return state

    # Followers (following.py)

    def follows(
        self, request: Request, start: int, out: SchedulerOutput, partials: Sequence[Request]
    ) -> bool:
        """Whether a waiting request waits for a checkpoint that one of `partials` is to leave.

        start: where the request could start in this step.
        """
        if not self.kv.reads_cache(request):
            return False
        if request.leader is not None and is_ahead(*request.leader):
            return self._ask(*request.leader, out)
        request.leader = None
        if request.num_followed == MAX_FOLLOWED:
            return False
        leaders = [leader for leader in partials if self.kv.may_name(leader)]
        for leader in leaders:
            self.kv.block_names(leader, leader.num_tokens)
        size = self.kv.block_size
        request.leader = find_leader(request, start, size, leaders)
        if request.leader is None or not self._ask(*request.leader, out):
            return False
        request.num_followed += 1
        return True

    def _ask(self, leader: Request, position: int, out: SchedulerOutput) -> bool:
        """Make a prompt leave a checkpoint at a position ahead of it; False without a slot."""
        segment = next((s for s in out.segments if s.request is leader), None)
        if segment is None or segment.end < position:
            add_planned(leader.planned, position)
            return True
        if any(c.request is leader and c.position == position for c in out.checkpoints):
            return True
        assert segment.state is not None, "a segment of a model with states"
        slot = segment.state.final
        if position < segment.end:
            spare = self.states.reserve()
            if spare is None:
                return False
            slot = spare
            segment.state.checkpoints.append((position, slot))
        out.checkpoints.append(Checkpoint(leader, slot, position, shared=True))
        return True

    # Names

    def name(self, checkpoint: Checkpoint, output: SchedulerOutput) -> None:
        """Name a state that the step `output` leaves, unless its request was aborted."""
        request, position = checkpoint.request, checkpoint.position
        if position > request.num_tokens or not self.kv.may_name(request):
            return
        names = self.kv.block_names(request, position)
        name = names[position // self.kv.block_size - 1]
        is_new = self.states.name(checkpoint.slot, name, checkpoint.disposable)
        if not (checkpoint.disposable or checkpoint.shared):
            self.states.add_own_checkpoint(request, name, is_new)
        if is_new:
            output.named_states.append(checkpoint.slot)
        if checkpoint.rolling:
            if request.rolling is not None:
                self.states.replace(request.rolling)
            # A request must not replace a checkpoint that another request left.
            request.rolling = name if is_new else None
