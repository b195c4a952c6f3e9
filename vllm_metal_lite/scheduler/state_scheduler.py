"""Decides for recurrent layers: the state slots of each segment, which states become checkpoints,
and which requests wait for a checkpoint that another request is about to leave.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_metal_lite.batch.forward_batch import SegmentState
from vllm_metal_lite.scheduler.checkpoints import Checkpoint, inner_starts, likely_starts
from vllm_metal_lite.scheduler.following import Following
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager, PrefixHit
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment
from vllm_metal_lite.scheduler.state_slots import StateSlots


@dataclass(slots=True)
class _Running:
    """The checkpoints of a running request.

    ahead: (position, num_next) of those that it will leave, in order.  start: the one that it
    started from, until it leaves one itself.  last: the last one on its path.
    """

    ahead: list[tuple[int, int]]
    start: Checkpoint | None
    last: Checkpoint | None


class StateScheduler:
    """The states of all running requests.

    max_draft_states: before how many drafts a segment leaves a state.
    """

    def __init__(self, kv: KVCacheManager, states: StateSlots, max_draft_states: int) -> None:
        self.kv, self.states, self.max_draft_states = kv, states, max_draft_states
        self._running: dict[Request, _Running] = {}
        self._following = Following(kv)

    # Seats

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Give slots to a request that starts behind `hit`, and choose its checkpoints."""
        start, size, ahead, checkpoint = hit.num_tokens, self.kv.block_size, [], None
        if start:
            checkpoint = self.states.checkpoint(request.block_names[start // size - 1])
            assert checkpoint is not None, "a prefix ends at a checkpoint"
            checkpoint.position = start
            self._use_path_to(checkpoint)
        if self.kv.enable_caching:
            junction = max(hit.num_in_blocks, start)
            likely = likely_starts(request, start, junction, size)
            ahead = sorted({**inner_starts(request, start, size), **likely}.items())
        self.states.admit(request, hit.state_slot)
        self._running[request] = _Running(ahead, checkpoint, checkpoint)

    def _use_path_to(self, checkpoint: Checkpoint | None) -> None:
        """A prompt uses the checkpoint that it starts from, and the forks before this one."""
        start = checkpoint
        while checkpoint is not None:
            if checkpoint.has_name and (checkpoint is start or checkpoint.num_next != 1):
                self.states.use(checkpoint)
            checkpoint = checkpoint.before

    def free(self, request: Request) -> None:
        """Take the slot of a request back, unless that is done."""
        if self._running.pop(request, None) is not None:
            self.states.leave(request)

    # Segments

    def decode(self, request: Request, start: int, out: SchedulerOutput) -> SegmentState:
        """The state slots of a decode.  The state at a block's end is kept: the next turn of a
        conversation starts there, if the answer ends before another block does."""
        slots = self.states.next_segment(request)
        if (start + 1) % self.kv.block_size == 0 and self.kv.enable_caching:
            out.checkpoints.append((request, Checkpoint(start + 1, slots.final)))
        return slots

    def slots_of_chunk(self, request: Request, end: int, out: SchedulerOutput) -> SegmentState:
        """The state slots of a chunk that ends at `end`, with its checkpoints."""
        if request not in out.admitted:
            self.states.next_segment(request)
        slots, ahead = self.states.running[request], self._running[request].ahead
        due = [p for p in ahead if p[0] <= end]
        del ahead[: len(due)]
        if end == request.num_tokens and end % self.kv.block_size == 0 and self.kv.enable_caching:
            # The next turn starts behind the whole prompt, unless the answer completes a block.
            due.append((end, 0))
        # If slots are few, the least likely starts get none.
        for position, num_next in sorted(due, key=lambda p: (p[1] == 1, -p[0])):
            self._leave(request, position, num_next, end, slots, out)
        return slots

    def _leave(
        self,
        request: Request,
        position: int,
        num_next: int,
        end: int,
        slots: SegmentState,
        out: SchedulerOutput,
    ) -> bool:
        """Make a segment that ends at `end` leave a checkpoint; False without a slot."""
        slot = slots.final if position == end else self.states.take()
        if slot is None:
            return False
        if position < end:
            slots.checkpoints.append((position, slot))
        out.checkpoints.append((request, Checkpoint(position, slot, num_next)))
        return True

    def lengthen(self, segment: Segment, num_drafts: int, num_sharing: int) -> int:
        """Let a segment that gets drafts leave the states before the first of them, too; returns
        how many drafts it may get, 0 without a slot.

        num_sharing: the segments that share the slots, this one included.
        """
        share = -(-self.states.num_available // num_sharing)
        count, end = min(num_drafts, self.max_draft_states, share), segment.end
        if not count:
            return 0
        segment.state = self.states.lengthen(segment.request, range(end, end + count))
        return min(num_drafts, self.most_drafts(end, count))

    def most_drafts(self, start: int, num_states: int | None = None) -> int:
        """The most drafts from position `start` on if only the first num_states leave states (None:
        max_draft_states): one more would pass the end of a block without a state."""
        last = start + (num_states or self.max_draft_states) - 1
        return last - last % self.kv.block_size + self.kv.block_size - start

    def accept(self, segment: Segment, end: int, output: SchedulerOutput) -> int:
        """Continue from the latest state that the accepted drafts, which end at `end`, reach;
        returns its position.  The state at the last end of a block before it becomes a checkpoint.
        """
        request, state = segment.request, segment.state
        assert state is not None, "a segment of a model with states"
        left = dict([*state.checkpoints, (segment.end, state.final)])
        latest = max(position for position in left if position <= end)
        self.states.continue_from(request, left[latest])
        block_end = latest - latest % self.kv.block_size
        if block_end > segment.known_end and self.kv.enable_caching:
            self._name(request, Checkpoint(block_end, left[block_end]), output)
        return latest

    # Followers (following.py)

    def follows(
        self, request: Request, start: int, out: SchedulerOutput, partials: Sequence[Request]
    ) -> bool:
        """Whether a waiting request waits for a checkpoint that one of `partials` is to leave.

        start: where the request could start in this step.
        """
        leader = self._following.leader(request, start, partials)
        return leader is not None and self._ask(*leader, out)

    def _ask(self, leader: Request, position: int, out: SchedulerOutput) -> bool:
        """Make a prompt leave a checkpoint at a position ahead of it; False without a slot."""
        segment = next((s for s in out.segments if s.request is leader), None)
        if segment is None or segment.end < position:
            ahead = self._running[leader].ahead
            ahead[:] = [p for p in ahead if p[0] != position]
            insort(ahead, (position, 2))
            return True
        for request, checkpoint in out.checkpoints:
            if request is leader and checkpoint.position == position:
                checkpoint.num_next = 2
                return True
        assert segment.state is not None, "a segment of a model with states"
        return self._leave(leader, position, 2, segment.end, segment.state, out)

    # Names

    def name_checkpoints(self, output: SchedulerOutput) -> None:
        """Name the states that a step leaves: requests of later steps may start there."""
        for request, checkpoint in sorted(output.checkpoints, key=lambda c: c[1].position):
            self._name(request, checkpoint, output)

    def _name(self, request: Request, checkpoint: Checkpoint, output: SchedulerOutput) -> None:
        position, running = checkpoint.position, self._running.get(request)
        was_aborted = position > request.num_tokens
        if was_aborted or not self.kv.may_name(request):
            return
        name = self.kv.block_names(request, position)[position // self.kv.block_size - 1]
        last = checkpoint.before = None if running is None else running.last
        if self.states.name(checkpoint.slot, name, checkpoint):
            output.named_states.append(checkpoint.slot)
            if running is not None and position < request.num_prompt_tokens:
                if running.start is not None:
                    running.start.num_next += 1
                    running.start = None
            elif last is not None and last.position >= request.num_prompt_tokens:
                self.states.replace(last)
        else:
            other = self.states.checkpoint(name)
            assert other is not None, "the name exists already"
            checkpoint, other.num_next = other, max(other.num_next, 2)  # two requests come by
        if running is not None:
            running.last = checkpoint
