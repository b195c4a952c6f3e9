"""Where requests leave states for later prompts, and what such a checkpoint is worth.

A state takes as much memory as K and V of thousands of tokens.  So checkpoints are few, at
positions where later prompts are likely to start:

- the end of the prompt: for the same prompt, and for the conversation's next turn;
- the junction: where the cached blocks of the prompt end, without a state.  Other prompts probably
  share this prefix too, a system prompt for example;
- positions that the caller names, such as the end of each message;
- 256, 512, 1,024, ... tokens before the end.  So a prompt that differs from this one in its last n
  tokens needlessly computes at most n tokens, or 256 if n is smaller;
- the end of each block of the answer, in place of the answer's previous checkpoint.

If slots run out, the checkpoint that is worth least is evicted (`state_slots.py`).
"""

from dataclasses import dataclass
from itertools import count, takewhile

from vllm_metal_lite.scheduler.request import Request

# Tokens from the last checkpoint inside a prompt to the prompt's end.
NEAREST = 256
# The most positions that a caller may name for one prompt.  More would evict the states of others.
MAX_NAMED = 8
# How many times less a checkpoint is worth after one prompt has passed it.  That was probably the
# next turn of its conversation.  A second prompt makes it a fork.
_PASSED = 8


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after the first `position` tokens of a request, in `slot`.

    num_next: how many prompts continue from here, expected ones included.  0: the end of a
    conversation.  1: one prompt has passed.  More: prompts fork here.
    before: the nearest checkpoint before this one on the request's path; None: there is none.
    used_at: the pool's clock at the last use.  has_name: whether prompts can start here.
    """

    position: int
    slot: int
    num_next: int = 0
    before: "Checkpoint | None" = None
    used_at: float = 0.0
    has_name: bool = False

    def priority(self) -> float:
        """What it is worth, plus `used_at`: the checkpoint with the lowest sum is evicted.

        The worth is how many tokens a prompt would compute without it, back to the checkpoint
        before, and an eighth of them if one prompt has passed.
        """
        before = self.before
        if before is not None and not before.has_name:
            while before is not None and not before.has_name:
                before = before.before
            self.before = before
        num_tokens = self.position if before is None else self.position - before.position
        return self.used_at + (num_tokens / _PASSED if self.num_next == 1 else num_tokens)


def likely_starts(request: Request, start: int, junction: int, block_size: int) -> dict[int, int]:
    """Position -> num_next of the checkpoints that later prompts will probably start from.

    start: where the request starts.  junction: where its cached blocks end, or `start`.  If the
    caller names too many positions, the first one, which most prompts share, and the last ones
    count.
    """
    end = request.last_boundary(request.num_tokens - 1, block_size)
    junction = request.last_boundary(junction, block_size)
    ends = {request.last_boundary(at, block_size) for at in request.checkpoint_positions}
    named = sorted(at for at in ends if start < at <= end)
    if len(named) > MAX_NAMED:
        named = [named[0], *named[1 - MAX_NAMED :]]
    # The conversation continues from its last named position; at the others, conversations fork.
    starts = {end: 0, **dict.fromkeys(named[:-1], 2), **dict.fromkeys(named[-1:], 0), junction: 2}
    return {at: num_next for at, num_next in starts.items() if at > start}


def inner_starts(request: Request, start: int, block_size: int) -> dict[int, int]:
    """Position -> num_next of the checkpoints for prompts that differ from here on."""
    distances = (NEAREST << i for i in count())
    ends = (request.last_boundary(max(request.num_tokens - n, 0), block_size) for n in distances)
    return dict.fromkeys(takewhile(lambda at: at > start, ends), 1)
