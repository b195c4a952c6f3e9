"""One request, as the scheduler sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.scheduler.block_pool import BlockTable


class RequestStatus(Enum):
    WAITING = auto()  # not computed yet
    RUNNING = auto()  # has a seat
    PREEMPTED = auto()  # waits again, for what it had computed to be computed again
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A request has no phases: it is `num_tokens - num_computed_tokens` behind, and steps close it.

    priority: lower goes first, as in vLLM.  arrival: earlier goes first within a priority.
    atomic: computed in one step, never chunked; `max_chunk` and the threshold do not apply to it.
    max_chunk: most tokens it gets in one step (0: no limit of its own).
    skip_prefix_cache_read: every token is computed, though its blocks are found by others.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    priority: int = 0
    arrival: int = 0
    atomic: bool = False
    skip_prefix_cache_read: bool = False
    max_chunk: int = 0

    # The prompt, then what was sampled; while a step samples another one, UNKNOWN_TOKEN for that.
    token_ids: list[int] = field(init=False, repr=False)
    num_prompt_tokens: int = field(init=False)
    # Tokens whose K and V are in the store, or will be when the step under way is done; those of
    # the last token sampled never are.
    num_computed_tokens: int = field(init=False, default=0)
    # Of these, the ones that the prefix cache held when the request was first admitted.
    num_cached_tokens: int = field(init=False, default=0)
    # The most it ever had computed when it had to give its blocks back; 0: never admitted before.
    num_computed_before: int = field(init=False, default=0)
    # One a KV group, all of one length; none while it has no seat.
    block_tables: list[BlockTable] = field(init=False, default_factory=list, repr=False)
    # Names of its first full blocks; they outlive preemption, for the tokens stay the same.
    block_hashes: list[bytes] = field(init=False, default_factory=list, repr=False)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    num_preemptions: int = field(init=False, default=0)
    # Set by Scheduler.add: its place among all requests, and the most tokens it will ever have.
    rank: tuple[int, int, int] = field(init=False, default=(0, 0, 0))
    max_length: int = field(init=False, default=0)
    # Set by the engine: its row of the InputBatch.
    req_index: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Length of its block tables."""
        return len(self.block_tables[0].block_ids) if self.block_tables else 0

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far: a copy, for reports rather than for every step."""
        return self.token_ids[self.num_prompt_tokens :]

    def forget_unknown(self) -> None:
        """The token that a step under way samples will not come."""
        if self.token_ids[-1] == UNKNOWN_TOKEN:
            self.token_ids.pop()
