"""The scheduler's decision for one step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from vllm_metal_lite.batch.forward_batch import SegmentState
from vllm_metal_lite.scheduler.checkpoints import Checkpoint
from vllm_metal_lite.scheduler.kv_manager import NewBlocks, PrefixHit
from vllm_metal_lite.scheduler.request import Request, RequestStatus


@dataclass(slots=True)
class Segment:
    """Tokens [num_computed, num_computed + num_scheduled) of a request.

    new_block_ids: blocks to append to its block tables, one sequence per KV group, or empty; for an
    admitted request, the whole tables.  state: None for a model without recurrent layers.
    draft_token_ids: the last of the scheduled tokens, which the request may never have.
    """

    request: Request
    num_computed: int
    num_scheduled: int
    new_block_ids: NewBlocks
    state: SegmentState | None = None
    draft_token_ids: Sequence[int] = ()

    @property
    def end(self) -> int:
        return self.num_computed + self.num_scheduled

    @property
    def is_prompt(self) -> bool:
        return self.request.is_prompt(self.num_computed)

    @property
    def starts_picture(self) -> bool:
        """Whether a picture starts in this segment, so that a tower may run."""
        pictures = self.request.pictures
        return pictures is not None and pictures.starts_in(self.num_computed, self.end)

    @property
    def known_end(self) -> int:
        """The end without drafts."""
        return self.end - len(self.draft_token_ids)


@dataclass(slots=True)
class TokenCounts:
    """Counters of tokens.  Field names are also the names of metrics.

    prefix_cache_lost_tokens: tokens in cached blocks without a state or a window at their end.
    """

    recomputed_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    prefix_cache_queried_tokens: int = 0
    prefix_cache_lost_tokens: int = 0

    def add_hit(self, request: Request, hit: PrefixHit) -> None:
        """Count a prompt's first admission.  The hit may reach beyond it, into forced tokens."""
        num_cached, num_prompt_tokens = request.num_cached_tokens, request.num_prompt_tokens
        self.prefix_cache_hit_tokens += num_cached
        self.prefix_cache_queried_tokens += num_prompt_tokens
        self.prefix_cache_lost_tokens += min(hit.num_in_blocks, num_prompt_tokens) - num_cached

    def add(self, other: "TokenCounts") -> None:
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class SchedulerOutput:
    """One step.  The caller launches it, calls `advance`, then `update` with its tokens.  If
    the step fails, before or after `advance`, the caller calls `rollback`.

    segments: one per request, those of one token first.  num_decodes: leading segments that are
    decodes; the others are (chunks of) prefills.
    admitted: requests that got a seat, new or resumed.  preempted: requests that lost theirs;
    handle these first, even if the step is empty.
    """

    segments: list[Segment] = field(default_factory=list)
    num_decodes: int = 0
    total_num_scheduled_tokens: int = 0
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    # The blocks that this step names, as pairs (KV group, block).
    named: list[tuple[int, int]] = field(default_factory=list)
    # `advance` names these checkpoints.
    checkpoints: list[tuple[Request, Checkpoint]] = field(default_factory=list)
    named_states: list[int] = field(default_factory=list)
    has_drafts: bool = False
    # Set by `advance`: the requests whose next token the step samples, in order.
    terminal: list[Request] = field(default_factory=list)
    # Set by `advance`: those terminal requests whose next tokens were known, with these tokens.
    forced: list[tuple[Request, list[int]]] = field(default_factory=list)
    # When the caller launched it, by time.monotonic().
    launched_at: float = 0.0
    # How long the requests of the step waited for its end.  Set at the end.
    seconds: float = 0.0
    # `update` adds them to the scheduler's.
    counts: TokenCounts = field(default_factory=TokenCounts)

    @property
    def is_empty(self) -> bool:
        return not self.segments

    @property
    def running(self) -> list[Request]:
        """The requests of this step that still run."""
        return [s.request for s in self.segments if s.request.status is RequestStatus.RUNNING]
