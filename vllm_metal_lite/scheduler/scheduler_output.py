"""What a step is to compute, as the scheduler decided it."""

from dataclasses import dataclass, field

from vllm_metal_lite.scheduler.kv_manager import NewBlocks
from vllm_metal_lite.scheduler.request import Request, RequestStatus


@dataclass(slots=True)
class Segment:
    """Tokens [num_computed, num_computed + num_scheduled) of a request.

    new_block_ids: to be added to its block tables, one sequence a KV group (or none at all); for an
    admitted request, the whole tables.
    """

    request: Request
    num_computed: int
    num_scheduled: int
    new_block_ids: NewBlocks


@dataclass(slots=True)
class SchedulerOutput:
    """One step.  The caller starts it and calls `advance`; then `update` when its tokens are there.
    If it fails, before or after `advance`: `rollback`.

    segments: one a request, those of one token first.  num_decodes: how many of the first segments
    are decodes; the other segments are (chunks of) prefills.
    admitted: requests that got a seat, new or resumed.  preempted: requests that lost theirs; to be
    taken note of first, even if the step is empty.
    """

    segments: list[Segment] = field(default_factory=list)
    num_decodes: int = 0
    total_num_scheduled_tokens: int = 0
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    # (KV group, block) of those that got their names in this step.
    published: list[tuple[int, int]] = field(default_factory=list)
    # Set by `advance`: those whose next token it samples, in order.
    terminal: list[Request] = field(default_factory=list)
    # For the scheduler's counters, once it has run.
    num_recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_queried_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.segments

    @property
    def is_wanted(self) -> bool:
        """Whether a request of it still runs."""
        return any(s.request.status is RequestStatus.RUNNING for s in self.segments)
