"""The scheduler's view of one request, and queues of them."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.batch.pictures import PlacedPictures
from vllm_metal_lite.scheduler.block_pool import BlockTable

# Tokens [start, end) of a prompt that one step computes together.
Span = tuple[int, int]


class RequestStatus(Enum):
    WAITING = auto()
    RUNNING = auto()  # has a seat
    FINISHED = auto()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request has no phases, only a gap, `num_tokens - num_computed_tokens`, which steps close.

    sort_key: the order among requests, lower first: (priority, fair_round, arrival), and the number
    that `Scheduler.add` appends.
    max_chunk: most tokens in one step, of this and all other requests with such a limit (0: none).
    skip_prefix_cache_read: computes every token, but other requests may reuse its blocks.
    only_reads: its one token is not used, so a prompt may fill the context.
    checkpoint_positions: where the caller expects later prompts to continue (checkpoints.py).
    spans: no chunk ends and no cached prefix ends within one; in order, without overlaps.
    pictures: those of the prompt; their digests are in the names of their blocks.
    cache_salt: only requests with the same salt, or without any, share blocks and states.
    parent_id: the id of the user's request; this one makes one of its n answers.
    """

    # What was asked.  Only `Scheduler.add` changes one of these: it completes sort_key.
    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    sort_key: tuple[int, ...] = ()
    skip_prefix_cache_read: bool = False
    only_reads: bool = False
    max_chunk: int = 0
    checkpoint_positions: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()
    pictures: PlacedPictures | None = None
    cache_salt: str | None = None
    parent_id: str = ""

    # What the scheduler knows.
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    # The prompt, then sampled tokens.  UNKNOWN_TOKEN replaces a token that a step is sampling.
    token_ids: list[int] = field(init=False, repr=False)
    # Tokens whose K and V are in the store, or will be after the steps in flight.  The last sampled
    # token is never stored.
    num_computed_tokens: int = field(init=False, default=0)
    # Tokens that the prefix cache held when the request was first admitted.
    num_cached_tokens: int = field(init=False, default=0)
    # Most tokens computed before a preemption or rollback; 0: none.
    num_computed_before: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    # The most tokens that it can have.  Set by `Scheduler.add`.
    max_length: int = field(init=False, default=0)

    # What the KVCacheManager knows.
    # One table per KV group, all of the same length; none while the request has no seat.
    block_tables: list[BlockTable] = field(init=False, default_factory=list, repr=False)
    # Names of the first full blocks; valid after preemption too, since the tokens stay the same.
    block_names: list[bytes] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Length of each block table."""
        return len(self.block_tables[0].block_ids) if self.block_tables else 0

    def is_prompt(self, position: int) -> bool:
        """Whether the token there is of the prompt, or was known before a preemption."""
        return position < max(self.num_prompt_tokens, self.num_computed_before + 1)

    def last_end(self, position: int) -> int:
        """The last position, up to this one, where a chunk may end: within no span."""
        at = bisect_left(self.spans, (position,)) - 1
        is_within = at >= 0 and position < self.spans[at][1]
        return self.spans[at][0] if is_within else position

    def last_boundary(self, position: int, block_size: int) -> int:
        """The last position, up to this one, where a cached prefix may end: within no span, and at
        the end of a block."""
        boundary = position // block_size * block_size
        while (end := self.last_end(boundary)) < boundary:
            boundary = end // block_size * block_size
        return boundary

    def forget_unknown(self) -> None:
        """Drop the UNKNOWN_TOKEN at the end: its step was abandoned."""
        if self.token_ids[-1] == UNKNOWN_TOKEN:
            self.token_ids.pop()


SORT_KEY = attrgetter("sort_key")


class RequestQueue(list[Request]):
    """Requests in the order of their sort_key.  Change it with `add` and `discard` only."""

    def add(self, request: Request) -> None:
        insort(self, request, key=SORT_KEY)

    def discard(self, request: Request) -> bool:
        """Remove a request; False if it is not here."""
        is_first = bool(self) and self[0] is request
        at = 0 if is_first else bisect_left(self, request.sort_key, key=SORT_KEY)
        if at == len(self) or self[at] is not request:
            return False
        del self[at]
        return True
