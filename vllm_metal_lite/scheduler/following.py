"""Decides which prompts wait for a checkpoint that another prompt is about to leave.

Two prompts with one prefix may arrive together.  They can share blocks within a step, but a
recurrent state can be read only in a later step.  Computing the prefix twice takes longer than
waiting, because both prompts would share the tokens of a step.  So the second prompt waits until
the first has passed the end of their common prefix, and the first leaves a checkpoint there.

A prompt follows another only while the other is being computed, and follows at most MAX_FOLLOWED
others.  So no prompt waits forever, and no prompt waits for one that is waiting.
"""

from bisect import bisect_left
from collections.abc import Iterable

from vllm_metal_lite.scheduler.request import Request, RequestStatus

# Tokens saved that are worth a step's delay.
WORTH_WAITING = 64
MAX_FOLLOWED = 2


def common_blocks(a: list[bytes], b: list[bytes]) -> int:
    """How many leading blocks two lists of names share.  A name covers its whole prefix, so equal
    names at an index mean equal names before."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])


def find_leader(
    request: Request, start: int, block_size: int, leaders: Iterable[Request]
) -> tuple[Request, int] | None:
    """(leader, position) of the longest common prefix that is worth waiting for, or None.

    start: where the request could start in this step.  leaders: prompts that are being computed,
    with the names of all their full blocks.
    """
    best, at, most = None, start + WORTH_WAITING - 1, request.num_tokens - 1
    for leader in leaders:
        blocks = common_blocks(request.block_names, leader.block_names)
        position = request.last_boundary(min(blocks * block_size, most), block_size)
        if position > at and position > leader.num_computed_tokens:
            best, at = leader, position
    return None if best is None else (best, at)


def is_ahead(leader: Request, position: int) -> bool:
    """Whether a prompt is being computed and has not passed the position."""
    running = leader.status is RequestStatus.RUNNING
    return running and leader.num_computed_tokens < min(position, leader.num_tokens)
