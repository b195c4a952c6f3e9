"""Where a prompt's states are kept for later prompts.

A state is worth thousands of tokens of K and V, so checkpoints are few, where they will be asked
for again:

- the end of the prompt: for the same prompt, and for the conversation's next turn;
- the junction: where a prompt leaves one that has blocks but no state there.  Others probably share
  this prefix too, a system prompt for example;
- positions that the caller names, such as the end of each message;
- every INTERVAL tokens of a long prompt, for a prompt that leaves it anywhere.  These are
  disposable: evicted before others.

Beside these, a decoding request keeps its last whole block's state (scheduler.py).
"""

from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple

INTERVAL = 4096
# Most positions that a caller can have kept for one prompt: more would evict everyone else's.
MAX_NAMED = 8


class Planned(NamedTuple):
    """A state to keep after `position` tokens.  disposable: evicted before others.  shared: of
    several conversations (state_slots.py)."""

    position: int
    disposable: bool = False
    shared: bool = False


def last_position(num_tokens: int, block_size: int) -> int:
    """The longest prefix of whole blocks that a prompt of these tokens can start behind: its last
    token is always computed."""
    return (num_tokens - 1) // block_size * block_size


def plan_checkpoints(
    num_tokens: int, start: int, block_size: int, junction: int, named: Iterable[int]
) -> list[Planned]:
    """The checkpoints of a prompt of num_tokens that is computed from `start` on, in order.

    junction: end of the blocks that are known, or `start`.  named: positions of the caller; of too
    many, the first, which most prompts share, and the last are kept.
    """
    end = last_position(num_tokens, block_size)
    wanted = sorted({at // block_size * block_size for at in named})
    wanted = [at for at in wanted if start < at <= end]
    if len(wanted) > MAX_NAMED:
        wanted = [wanted[0], *wanted[1 - MAX_NAMED :]]
    kept = {at for at in (*wanted, junction, end) if start < at <= end}
    first = (start // INTERVAL + 1) * INTERVAL
    passing = {at // block_size * block_size for at in range(first, end, INTERVAL)} - kept
    planned = [Planned(at, shared=at == junction) for at in kept]
    return sorted(planned + [Planned(at, disposable=True) for at in passing if at > start])


def end_of_turn(num_tokens: int, block_size: int, named: Iterable[int]) -> int:
    """A prompt that begins like this one up to here, and further, is the conversation's next turn:
    the last position that the caller names, or else the end of the prompt."""
    end = last_position(num_tokens, block_size)
    return max((at for n in named if (at := n // block_size * block_size) <= end), default=end)


def plan_also(planned: list[Planned], position: int) -> None:
    """Add a checkpoint that another prompt waits for."""
    planned[:] = [p for p in planned if p.position != position]
    insort(planned, Planned(position, shared=True))
