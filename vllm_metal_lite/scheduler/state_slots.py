"""Records which requests and checkpoints hold which slots of recurrent states.

Like a block of K and V (block_pool.py), a slot is free, cached under a name, or owned.
A running request owns the slot of its state.  A slot with a name is a *checkpoint*: the state after
a prefix of whole blocks, with the name of the prefix's last block.  A checkpoint never changes.  So
a request whose state becomes a checkpoint writes its next state to another slot; nothing is copied.

Every empty seat has a slot in reserve, so no request ever waits for a slot.  Checkpoints get the
other slots.  If none is left, a request overwrites the checkpoint in its own slot.  Drafts take
slots of both kinds for a step, those of empty seats and those of checkpoints.

What a step releases stays owned until the next step: within a step, no slot that one segment writes
may be read or written by another.

Eviction is GreedyDual, a rule for caches whose entries cost unlike amounts.  The checkpoint with
the lowest priority goes, and the clock becomes this priority.  A priority is the worth plus
`used_at`, the clock at the last use.  So each checkpoint goes once it is unused for long.
"""

from collections.abc import Sequence
from itertools import islice

from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, SegmentState
from vllm_metal_lite.scheduler.block_pool import BlockPool
from vllm_metal_lite.scheduler.checkpoints import Checkpoint
from vllm_metal_lite.scheduler.request import Request

# Eviction chooses among this many checkpoints, the least recently used ones: to look at all would
# take too long with thousands of slots.
_COMPARED = 64


class StateSlots(BlockPool):
    """Slots 0 .. num_slots - 1 for at most num_seats running requests.

    running: the slots of the last segment of each running request.  num_taken: checkpoints so far.
    """

    def __init__(self, num_slots: int, num_seats: int) -> None:
        if num_slots < num_seats:
            raise ValueError(f"{num_slots} state slots are fewer than {num_seats} requests")
        super().__init__(num_slots)
        self.num_seats = num_seats
        self.num_taken = 0
        self.running: dict[Request, SegmentState] = {}
        self._held: list[int] = []
        self._checkpoints: dict[int, Checkpoint] = {}  # by slot
        self._clock = 0.0

    def begin_step(self) -> None:
        """Release what the last step held."""
        if self._held:
            held, self._held = self._held, []
            self.free(held)

    @property
    def num_spare(self) -> int:
        """The slots that are available beyond the reserve."""
        return self.num_available - (self.num_seats - len(self.running))

    # The slots of segments

    def admit(self, request: Request, hit: int | None) -> None:
        """Give slots to a request that starts in this step from the checkpoint in slot `hit`, or at
        position 0."""
        if hit is None:
            self.running[request] = SegmentState(EMPTY_SLOT, self._allocate())
            return
        in_use = self.is_owned(hit)
        self.touch([hit])
        if in_use or self.num_spare >= 0:  # the reserve has one for this request
            self._held.append(hit)
            self.running[request] = SegmentState(hit, self._allocate())
        else:
            self.unname([hit])
            self.running[request] = SegmentState(hit, hit)

    def next_segment(self, request: Request) -> SegmentState:
        """The slots of a running request's next segment."""
        state = self.running[request]
        current = state.final
        if self.has_name(current):
            if self.num_spare > 0:
                self._held.append(current)
                self.running[request] = state = SegmentState(current, self._allocate())
                return state
            self.unname([current])
        if state.initial != current or state.checkpoints:
            self.running[request] = state = SegmentState(current, current)
        return state

    def lengthen(self, request: Request, positions: Sequence[int]) -> SegmentState:
        """The slots of a segment that gets drafts after its end, positions[0].  The states at
        `positions` stay in slots of their own until the next step.

        At least as many slots must be available.  These may be the reserve of empty seats: this
        step admits no more requests, and the next step has the slots back.
        """
        state, new = self.running[request], self.allocate(len(positions))
        assert new is not None, "drafts were given the slots that are left"
        *kept, final = state.final, *new
        self._held += kept
        states = [*state.checkpoints, *zip(positions, kept, strict=True)]
        self.running[request] = state = SegmentState(state.initial, final, states)
        return state

    def continue_from(self, request: Request, slot: int) -> None:
        """Make a state that the last segment left the request's own."""
        own = self.running[request].final
        if slot != own:
            self._held.remove(slot)
            self._held.append(own)
            self.running[request] = SegmentState(slot, slot)

    def take(self) -> int | None:
        """A slot for a state inside a segment of this step; None if none is left."""
        if self.num_spare <= 0:
            return None
        slot = self._allocate()
        self._held.append(slot)
        return slot

    def leave(self, request: Request) -> None:
        """Take the slot of a request back that has no seat any more."""
        self._held.append(self.running.pop(request).final)

    def _allocate(self) -> int:
        new = self.allocate(1)
        assert new is not None, "the reserve has a slot for each empty seat"
        return new[0]

    # Checkpoints

    def checkpoint(self, name: bytes) -> Checkpoint | None:
        slot = self.lookup(name)
        return None if slot is None else self._checkpoints[slot]

    def name(self, block_id: int, name: bytes, checkpoint: Checkpoint | None = None) -> bool:
        """Make a slot a checkpoint; False if the name exists already.

        checkpoint: None for a state that comes from elsewhere; its first prompt sets its position.
        """
        if not super().name(block_id, name):
            return False
        self._checkpoints[block_id] = checkpoint = checkpoint or Checkpoint(0, block_id)
        self.num_taken += 1
        checkpoint.has_name = True
        self.use(checkpoint)
        return True

    def use(self, checkpoint: Checkpoint) -> None:
        """Record that a prompt uses a checkpoint."""
        checkpoint.used_at = self._clock
        self.evict_last([checkpoint.slot])

    def replace(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint that the next one of its answer replaces, unless others use it."""
        if checkpoint.has_name and not checkpoint.num_next:
            self.unname([checkpoint.slot])

    def _least_useful(self) -> int:
        oldest = map(self._checkpoints.__getitem__, islice(self._cached, _COMPARED))
        checkpoint = min(oldest, key=Checkpoint.priority)
        self._clock = max(self._clock, checkpoint.priority())
        return checkpoint.slot

    def _forget(self, block: int) -> None:
        super()._forget(block)
        self._checkpoints.pop(block).has_name = False
