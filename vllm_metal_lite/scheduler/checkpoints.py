"""Chooses where a prompt's states are kept for later prompts.

A state takes as much memory as K and V of thousands of tokens.  So checkpoints are few, at
positions where later prompts are likely to start:

- the end of the prompt: for the same prompt, and for the conversation's next turn;
- the junction: where the known blocks of the prompt end, without a state.  Other prompts probably
  share this prefix too, a system prompt for example;
- positions that the caller names, such as the end of each message;
- every INTERVAL tokens of a long prompt, for a prompt that differs from there on.  These are
  disposable: evicted before others.

A decoding request also keeps the state at the end of its last whole block (state_scheduler.py).
"""

from bisect import insort
from collections.abc import Callable, Iterable
from typing import NamedTuple

INTERVAL = 4096
# The most positions that a caller may name for one prompt.  More would evict the states of others.
MAX_NAMED = 8


class PlannedCheckpoint(NamedTuple):
    """A state to keep after `position` tokens.  disposable: evicted before others.  shared:
    several conversations use it (state_slots.py)."""

    position: int
    disposable: bool = False
    shared: bool = False


def plan_checkpoints(
    num_tokens: int,
    start: int,
    last_boundary: Callable[[int], int],
    junction: int,
    checkpoint_positions: Iterable[int],
) -> list[PlannedCheckpoint]:
    """The checkpoints of a prompt of num_tokens that is computed from `start` on, in order.

    last_boundary: `Request.last_boundary`.  junction: end of the known blocks, or `start`.
    checkpoint_positions: named by the caller.  Of too many, the first one, which most prompts
    share, and the last ones are used.
    """
    end = last_boundary(num_tokens - 1)
    wanted = sorted(set(map(last_boundary, checkpoint_positions)))
    wanted = [at for at in wanted if start < at <= end]
    if len(wanted) > MAX_NAMED:
        wanted = [wanted[0], *wanted[1 - MAX_NAMED :]]
    kept = {at for at in (*wanted, junction, end) if start < at <= end}
    first = (start // INTERVAL + 1) * INTERVAL
    passing = set(map(last_boundary, range(first, end, INTERVAL))) - kept
    planned = [PlannedCheckpoint(at, shared=at == junction) for at in kept]
    return sorted(
        planned + [PlannedCheckpoint(at, disposable=True) for at in passing if at > start]
    )


def end_of_turn(
    num_tokens: int, last_boundary: Callable[[int], int], checkpoint_positions: Iterable[int]
) -> int:
    """The position from which a prompt with the same beginning is the conversation's next turn:
    the last one that the caller names, or the end of the prompt."""
    end = last_boundary(num_tokens - 1)
    ends = map(last_boundary, checkpoint_positions)
    return max((at for at in ends if at <= end), default=end)


def add_planned(planned: list[PlannedCheckpoint], position: int) -> None:
    """Add a checkpoint that another prompt waits for."""
    planned[:] = [p for p in planned if p.position != position]
    insort(planned, PlannedCheckpoint(position, shared=True))
