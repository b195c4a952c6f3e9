"""Which checkpoints a conversation has left behind.

A turn leaves checkpoints for the next turn, which starts from one of them and leaves its own.  The
checkpoints of the turn before only take slots from then on.  The *trail* of a request is its
checkpoints for the next turn.  A request that starts at the end of a trail, or behind that,
continues the trail.  Once the request has left a checkpoint of its own, the rest of the old trail
is evicted before other checkpoints.
"""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Trail:
    """end: a request that starts at this position, or behind it, is the next turn.  slots: of the
    checkpoints."""

    end: int
    slots: set[int] = field(default_factory=set)


class Trails:
    """The trail of each slot.  A slot is in one trail at most."""

    def __init__(self) -> None:
        self._of: dict[int, Trail] = {}

    def add(self, slot: int, trail: Trail) -> None:
        self.forget(slot)
        self._of[slot] = trail
        trail.slots.add(slot)

    def forget(self, slot: int) -> None:
        """Take a slot off its trail."""
        if (trail := self._of.pop(slot, None)) is not None:
            trail.slots.discard(slot)

    def continued(self, slot: int, position: int) -> Trail | None:
        """The trail that a request continues if it starts at `position`, from this slot."""
        trail = self._of.get(slot)
        return trail if trail is not None and position >= trail.end else None

    def take_over(self, slot: int, old: Trail | None, trail: Trail) -> None:
        """Move a slot from the old trail, if it is there, to the one that continues it."""
        if old is not None and self._of.get(slot) is old:
            self.add(slot, trail)

    def leave(self, trail: Trail) -> list[int]:
        """End a trail; its slots."""
        slots = list(trail.slots)
        for slot in slots:
            self.forget(slot)
        return slots
