"""Decides which prompts wait for a checkpoint that another prompt is about to leave.

Two prompts with one prefix may arrive together.  They can share blocks within a step, but a
recurrent state can be read only in a later step.  Computing the prefix twice takes longer than
waiting, because both prompts would share the tokens of a step.  So the second prompt follows the
first: it waits until the first has passed the end of their common prefix and left a checkpoint
there.

A prompt follows another only while the other is being computed, and follows at most MAX_FOLLOWED
others.  So no prompt waits forever, and no prompt waits for one that is waiting.
"""

from bisect import bisect_left
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request, RequestStatus

# Tokens saved that are worth a step's delay.
WORTH_WAITING = 64
MAX_FOLLOWED = 2


def common_blocks(a: list[bytes], b: list[bytes]) -> int:
    """How many leading blocks two lists of names share.  A name covers its whole prefix, so equal
    names at an index mean equal names before."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])


class Following:
    """Which prompts each waiting prompt follows."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        # The prompts that a request has followed, each with the position of their checkpoint.
        self._followed: WeakKeyDictionary[Request, list[tuple[Request, int]]] = WeakKeyDictionary()

    def leader(
        self, request: Request, start: int, prompts: Iterable[Request]
    ) -> tuple[Request, int] | None:
        """The prompt that a waiting request should follow, and the position of the checkpoint.

        start: where the request could start in this step.  prompts: those being computed.
        """
        if not self.kv.reads_cache(request):
            return None
        followed = self._followed.setdefault(request, [])
        if followed and _is_ahead(*followed[-1]):
            return followed[-1]
        if len(followed) == MAX_FOLLOWED:
            return None
        size, best, at = self.kv.block_size, None, start + WORTH_WAITING - 1
        for prompt in prompts:
            if self.kv.may_name(prompt):
                self.kv.block_names(prompt, prompt.num_tokens)
                blocks = common_blocks(request.block_names, prompt.block_names)
                most = min(blocks * size, request.num_tokens - 1)
                position = request.last_boundary(most, size)
                if position > at and position > prompt.num_computed_tokens:
                    best, at = prompt, position
        if best is None:
            return None
        followed.append((best, at))
        return best, at


def _is_ahead(leader: Request, position: int) -> bool:
    """Whether a prompt is being computed and has not passed the position."""
    running = leader.status is RequestStatus.RUNNING
    return running and leader.num_computed_tokens < min(position, leader.num_tokens)
