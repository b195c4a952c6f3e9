"""Which requests hold which slots of recurrent states.

Like a block of K and V (block_pool.py), a slot is free, cached under a name, or owned.
A running request owns the slot of its state.  A slot with a name is a *checkpoint*: the state after
a prefix of whole blocks, with the name of the prefix's last block.  A checkpoint never changes.  So
a request whose state becomes a checkpoint writes its next state to another slot; nothing is copied.

Every empty seat has a slot in reserve, so no request ever waits for a slot.  Checkpoints get the
others, and give way if there are none.

What a step releases stays owned until the next step: within a step, no slot that one segment writes
may be read or written by another.
"""

from collections.abc import Iterable

from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT
from vllm_metal_lite.batch.segment_state import SegmentState
from vllm_metal_lite.scheduler.block_pool import BlockPool
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.trails import Trail, Trails


class StateSlots:
    """Slots 0 .. num_slots - 1 for at most num_seats running requests.

    num_taken, num_evicted: checkpoints so far.
    """

    def __init__(self, num_slots: int, num_seats: int, enable_caching: bool) -> None:
        if num_slots < num_seats:
            raise ValueError(f"{num_slots} state slots are fewer than {num_seats} requests")
        self.pool = BlockPool(num_slots, enable_caching)
        self.num_seats = num_seats
        self.num_taken = 0
        self._held: list[int] = []
        self._disposable: set[int] = set()
        self._found: set[int] = set()  # checkpoints that a request has started from
        self._trails = Trails()

    @property
    def num_evicted(self) -> int:
        return self.pool.num_evicted

    def begin_step(self) -> None:
        """Release what the last step held."""
        if self._held:
            held, self._held = self._held, []
            self.pool.free(held)
            self.pool.evict_first(s for s in held if s in self._disposable)

    def has_spare(self, num_running: int) -> bool:
        """Whether a slot is available beside the reserve."""
        return self.pool.num_available > self.num_seats - num_running

    def lookup(self, name: bytes) -> int | None:
        """The slot of a checkpoint, or None."""
        return self.pool.lookup(name)

    def go_on_from(
        self, request: Request, end: int, hit: int | None, position: int, named: Iterable[bytes]
    ) -> None:
        """Note which trail a request continues that is about to start from `hit`, at `position`.

        end: of its own trail.  named: of the positions before that the request names.
        """
        if request.trail is None:
            request.trail = Trail(end)
        if hit in self._found:  # a second one goes on from here
            self._trails.forget(hit)
        elif hit is not None:
            trail = self._trails.continued(hit, position)
            if trail is not None and trail is not request.trail:
                request.continued = trail
                self._trails.add(hit, request.trail)  # kept for one more turn
        for name in named:
            if (slot := self.pool.lookup(name)) is not None:
                self._trails.take_over(slot, request.continued, request.trail)
                self._disposable.discard(slot)
                self.pool.evict_last([slot])

    def lay_trail(self, request: Request, name: bytes, is_new: bool) -> None:
        """Put a checkpoint of a request on its trail.  It leaves the one that it continues."""
        slot, trail = self.pool.lookup(name), request.trail
        if slot is None or trail is None:
            return
        if not is_new:
            self._trails.take_over(slot, request.continued, trail)
            return
        self._trails.add(slot, trail)
        if request.continued is not None:
            left = self._trails.leave(request.continued)
            self._disposable.update(left)
            self.pool.evict_first(left)
            request.continued = None

    def admit(self, request: Request, hit: int | None, num_running: int) -> None:
        """Give slots to a request that starts in this step from checkpoint `hit`, or at position 0.

        num_running: with this request.
        """
        pool = self.pool
        if hit is None:
            request.state = SegmentState(EMPTY_SLOT, self._allocate())
            return
        in_use = pool.is_owned(hit)
        pool.touch([hit])
        self._found.add(hit)
        self._disposable.discard(hit)
        if in_use or self.has_spare(num_running):
            self._held.append(hit)
            request.state = SegmentState(hit, self._allocate())
        else:
            self.unname([hit])
            request.state = SegmentState(hit, hit)

    def go_on(self, request: Request, num_running: int) -> SegmentState:
        """The slots of a running request's next segment."""
        state = request.state
        assert state is not None, "a running request has a state"
        current = state.final
        if self.pool.has_name(current):
            if self.has_spare(num_running):
                self._held.append(current)
                request.state = SegmentState(current, self._allocate())
                return request.state
            self.unname([current])
        if state.initial != current or state.checkpoints:
            request.state = state = SegmentState(current, current)
        return state

    def reserve(self, num_running: int) -> int | None:
        """A slot for a state inside of a segment of this step; None if there is none to spare."""
        if not self.pool.enable_caching or not self.has_spare(num_running):
            return None
        slot = self._allocate()
        self._held.append(slot)
        return slot

    def name(self, slot: int, name: bytes, disposable: bool = False) -> bool:
        """Make a slot of the last step a checkpoint; False if there is one of this name.

        disposable: evicted before others, until a request starts from it.
        """
        if not self.pool.publish(slot, name):
            return False
        self.num_taken += 1
        self._forget(slot)
        if disposable:
            self._disposable.add(slot)
        return True

    def replace(self, name: bytes) -> None:
        """Drop a checkpoint that a later one of its request replaces, unless others use it."""
        slot = self.pool.lookup(name)
        if slot is not None and slot not in self._found:
            self.unname([slot])

    def free(self, request: Request) -> None:
        """Take a request's slot back."""
        if request.state is not None:
            self._held.append(request.state.final)
            request.state = None

    def check(self, requests: list[Request]) -> None:
        """Assert that the slots' accounts are consistent, given all running requests."""
        owned = [[r.state.final] for r in requests if r.state is not None]
        self.pool.check([*owned, self._held])
        assert self.pool.num_available + len(self._held) >= self.num_seats - len(owned)

    def _allocate(self) -> int:
        new = self.pool.allocate(1)
        assert new is not None, "the reserve has a slot for each empty seat"
        return new[0]

    def unname(self, slots: Iterable[int]) -> None:
        """Take the names of checkpoints away."""
        for slot in slots:
            self.pool.unpublish([slot])
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._disposable.discard(slot)
        self._found.discard(slot)
        self._trails.forget(slot)
