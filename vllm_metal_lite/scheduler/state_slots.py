"""Records which requests hold which slots of recurrent states.

Like a block of K and V (block_pool.py), a slot is free, cached under a name, or owned.
A running request owns the slot of its state.  A slot with a name is a *checkpoint*: the state after
a prefix of whole blocks, with the name of the prefix's last block.  A checkpoint never changes.  So
a request whose state becomes a checkpoint writes its next state to another slot; nothing is copied.

Every empty seat has a slot in reserve, so no request ever waits for a slot.  Checkpoints get the
other slots.  If none is left, a request overwrites the checkpoint in its own slot.

A turn of a conversation leaves checkpoints for the next turn, which starts from one of them and
leaves its own.  A request that starts at or after the end of an earlier request's checkpoints
continues that conversation.  Once the request has left a checkpoint of its own, the rest of the
earlier ones is evicted before other checkpoints.

What a step releases stays owned until the next step: within a step, no slot that one segment writes
may be read or written by another.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, SegmentState
from vllm_metal_lite.scheduler.block_pool import BlockPool
from vllm_metal_lite.scheduler.request import ConversationCheckpoints, Request


@dataclass(slots=True)
class _Checkpoint:
    """disposable: evicted before others.  was_used: a request has started from it.  owner: the
    checkpoints of its conversation."""

    disposable: bool = False
    was_used: bool = False
    owner: ConversationCheckpoints | None = None


class StateSlots:
    """Slots 0 .. num_slots - 1 for at most num_seats running requests.

    num_taken: checkpoints so far.
    """

    def __init__(self, num_slots: int, num_seats: int) -> None:
        if num_slots < num_seats:
            raise ValueError(f"{num_slots} state slots are fewer than {num_seats} requests")
        self.pool = BlockPool(num_slots)
        self.num_seats = num_seats
        self.num_taken = 0
        self._num_owners = 0  # running requests, each with the slot of its state
        self._held: list[int] = []
        self._checkpoints: dict[int, _Checkpoint] = {}  # by slot; an evicted one stays until reuse

    def begin_step(self) -> None:
        """Release what the last step held."""
        if self._held:
            held, self._held = self._held, []
            self.pool.free(held)
            of = self._checkpoints
            self.pool.evict_first(s for s in held if s in of and of[s].disposable)

    @property
    def num_spare(self) -> int:
        """The slots that are available beside the reserve."""
        return self.pool.num_available - (self.num_seats - self._num_owners)

    def continue_from(
        self, request: Request, end: int, hit: int | None, position: int, names: Iterable[bytes]
    ) -> None:
        """Record which conversation a request continues; it starts from `hit`, at `position`.

        end: the end of its own checkpoints.  names: of the blocks that end at its
        checkpoint_positions.
        """
        if request.own_checkpoints is None:
            request.own_checkpoints = ConversationCheckpoints(end)
        if hit is not None:
            start = self._checkpoints[hit]
            if start.was_used:  # a second request continues from here
                start.owner = None
            elif start.owner not in (None, request.own_checkpoints) and position >= start.owner.end:
                request.earlier_checkpoints = start.owner
                start.owner = request.own_checkpoints  # kept for one more turn
        for name in names:
            if (slot := self.pool.lookup(name)) is not None:
                self._take_over(slot, request)
                self._checkpoints[slot].disposable = False
                self.pool.evict_last([slot])

    def _take_over(self, slot: int, request: Request) -> None:
        """Move a checkpoint of the earlier turn to the request's own."""
        checkpoint = self._checkpoints[slot]
        if checkpoint.owner is not None and checkpoint.owner is request.earlier_checkpoints:
            checkpoint.owner = request.own_checkpoints

    def add_own_checkpoint(self, request: Request, name: bytes, is_new: bool) -> None:
        """Add a checkpoint of a request; those of the earlier turn are then evicted first."""
        slot = self.pool.named(name)
        if not is_new:
            self._take_over(slot, request)
            return
        self._checkpoints[slot].owner = request.own_checkpoints
        if request.earlier_checkpoints is not None:
            earlier = request.earlier_checkpoints
            left = {s: c for s, c in self._checkpoints.items() if c.owner is earlier}
            for checkpoint in left.values():
                checkpoint.owner, checkpoint.disposable = None, True
            self.pool.evict_first(left)
            request.earlier_checkpoints = None

    def admit(self, request: Request, hit: int | None) -> None:
        """Give slots to a request that starts in this step from checkpoint `hit`, or at position
        0."""
        pool = self.pool
        self._num_owners += 1
        if hit is None:
            request.state = SegmentState(EMPTY_SLOT, self._allocate())
            return
        in_use = pool.is_owned(hit)
        pool.touch([hit])
        checkpoint = self._checkpoints[hit]
        checkpoint.was_used, checkpoint.disposable = True, False
        if in_use or self.num_spare > 0:
            self._held.append(hit)
            request.state = SegmentState(hit, self._allocate())
        else:
            self.unname([hit])
            request.state = SegmentState(hit, hit)

    def next_segment(self, request: Request) -> SegmentState:
        """The slots of a running request's next segment."""
        state = request.state
        assert state is not None, "a running request has a state"
        current = state.final
        if self.pool.has_name(current):
            if self.num_spare > 0:
                self._held.append(current)
                request.state = SegmentState(current, self._allocate())
                return request.state
            self.unname([current])
        if state.initial != current or state.checkpoints:
            request.state = state = SegmentState(current, current)
        return state

    def draft(self, request: Request) -> SegmentState | None:
        """The slots of a decode with drafts, after `next_segment`: the state before them stays
        until the next step.  None: no slot is left.  It may use the reserve of an empty seat: this
        step admits no more requests, and the next step has the slot back."""
        state = request.state
        assert state is not None, "a running request has a state"
        if state.initial == state.final:
            if not self.pool.num_available:
                return None
            self._held.append(state.initial)
            request.state = state = SegmentState(state.initial, self._allocate())
        return state

    def take_back(self, request: Request) -> None:
        """Return to the state before the drafts of the last step."""
        state = request.state
        assert state is not None, "a running request has a state"
        self._held.remove(state.initial)
        self._held.append(state.final)
        request.state = SegmentState(state.initial, state.initial)

    def reserve(self) -> int | None:
        """A slot for a state inside a segment of this step; None if none is left."""
        if self.num_spare <= 0:
            return None
        slot = self._allocate()
        self._held.append(slot)
        return slot

    def name(self, slot: int, name: bytes, disposable: bool = False) -> bool:
        """Make a slot of the last step a checkpoint; False if the name exists already.

        disposable: evicted before others, until a request starts from it.
        """
        if not self.pool.name(slot, name):
            return False
        self.num_taken += 1
        self._checkpoints[slot] = _Checkpoint(disposable)
        return True

    def replace(self, name: bytes) -> None:
        """Drop a checkpoint that a later one of its request replaces, unless others use it."""
        slot = self.pool.lookup(name)
        if slot is not None and not self._checkpoints[slot].was_used:
            self.unname([slot])

    def free(self, request: Request) -> None:
        """Take a request's slot back."""
        if request.state is not None:
            self._held.append(request.state.final)
            request.state = None
            self._num_owners -= 1

    def _allocate(self) -> int:
        new = self.pool.allocate(1)
        assert new is not None, "the reserve has a slot for each empty seat"
        return new[0]

    def unname(self, slots: Iterable[int]) -> None:
        """Remove the names of checkpoints."""
        for slot in slots:
            self.pool.unname([slot])
            self._checkpoints.pop(slot, None)
