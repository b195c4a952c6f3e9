"""Where a segment's recurrent state comes from, and where it goes."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SegmentState:
    """The state slots of a segment.

    initial: read at its start, or EMPTY_SLOT.  final: written at its end.  checkpoints: (position,
    slot) pairs; `slot` takes the state after the request's first `position` tokens.
    """

    initial: int
    final: int
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
