"""Lengthens decodes by drafts, and keeps the accepted ones.

A decode with k drafts is a segment of 1 + k rows.  All rows are sampled.  The request gets the
tokens of the first row and of each row behind an accepted draft.  The next step overwrites K and V
of the other rows.  So a draft costs only rows, and blocks until the next step.

A recurrent state cannot be overwritten in part.  So the segment leaves the states before its first
drafts and the one behind the last, each in a slot of its own.  The request continues from the
latest of these states that no wrong draft precedes.  Longer drafts, or fewer slots, leave further
drafts without a state: after an error among these, the next step computes the accepted ones again,
before new drafts.  A draft passes the end of a block only if a state there can become a checkpoint.
"""

from collections.abc import Callable, Sequence

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.config import MAX_DRAFT, MAX_MODEL_DRAFTS
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment
from vllm_metal_lite.scheduler.state_scheduler import StateScheduler

# (Segment, the most tokens) pairs -> the drafts of each request; [] for none.
Propose = Callable[[Sequence[tuple[Segment, int]]], Sequence[Sequence[int]]]


class DraftScheduler:
    """states: None for a model without recurrent layers."""

    def __init__(self, kv: KVCacheManager, states: StateScheduler | None) -> None:
        self.kv, self._states = kv, states

    @property
    def has_room(self) -> bool:
        """Whether a decode may get drafts: with recurrent layers it needs another slot."""
        return self.kv.states is None or self.kv.states.num_available > 0

    def add(self, out: SchedulerOutput, propose: Propose, budget: int, num_running: int) -> None:
        """Lengthen segments of a scheduled step that end with their request's last known token.

        budget: the most drafts.  num_running: requests that have a seat.
        """
        decodes = out.segments[: out.num_decodes]
        wanted = [
            (s, most)
            for s in out.segments
            # An admitted request has no seat yet, whose tokens the drafts would follow.
            if not s.is_prompt and s.end == s.request.num_tokens and s.request not in out.admitted
            if (most := self._room(s)) > 0
        ]
        if budget < 1 or not wanted or not self.has_room:
            return
        proposed = propose(wanted)
        lengths = list(map(len, proposed))
        cap = max(lengths)
        while sum(min(length, cap) for length in lengths) > budget:
            cap -= 1  # the longest drafts lose most
        # A block stays for each running request, so that a draft never causes a preemption.
        spare = self.kv.num_available - num_running
        pairs = [(s, draft) for (s, _), draft in zip(wanted, proposed, strict=True) if draft]
        drafted: list[Segment] = []
        for i, (segment, draft) in enumerate(pairs):
            owned = segment.request.num_blocks
            most = (owned + max(spare, 0)) * self.kv.block_size - segment.end
            draft = draft[: min(cap, most)]
            if self._states is not None:
                draft = draft[: self._states.lengthen(segment, len(draft), len(pairs) - i)]
            if not draft:
                continue
            self._add(segment, draft, limit=segment.end + most)
            spare -= segment.request.num_blocks - owned
            out.total_num_scheduled_tokens += len(draft)
            drafted.append(segment)
        if drafted:
            longer = [s for s in decodes if s.draft_token_ids]
            plain = [s for s in decodes if not s.draft_token_ids]
            out.segments[: len(decodes)] = plain + longer
            out.num_decodes, out.has_drafts = len(plain), True

    def _room(self, segment: Segment) -> int:
        """The most drafts of a decode.  The token after them is within max_length, too."""
        request = segment.request
        if request.token_ids[-1] == UNKNOWN_TOKEN:
            return 0
        most = min(MAX_DRAFT, request.max_length - request.num_tokens - 1)
        return most if self._states is None else min(most, self._states.most_drafts(segment.end))

    def _add(self, segment: Segment, draft: Sequence[int], limit: int) -> None:
        start, end = segment.num_computed, segment.end + len(draft)
        further = end
        if len(draft) <= MAX_MODEL_DRAFTS:  # the drafter continues its own ahead of the next step
            further = min(end + len(draft), segment.request.max_length, limit)
        new = self.kv.allocate(segment.request, start, max(end, further))
        assert new is not None, "drafts were cut to the blocks that are left"
        if new and segment.new_block_ids:
            new = [[*a, *b] for a, b in zip(segment.new_block_ids, new, strict=True)]
        segment.new_block_ids = new or segment.new_block_ids
        segment.num_scheduled += len(draft)
        segment.draft_token_ids = draft

    def accept(self, segment: Segment, output: SchedulerOutput, accepted: Sequence[int]) -> bool:
        """Keep the accepted drafts.  accepted: the sampled tokens behind the first one.

        False: the next step computes the last of the drafts again, for want of a state.
        """
        request, first = segment.request, segment.known_end
        request.token_ids += accepted
        end = computed = first + len(accepted)
        if self._states is not None:
            computed = self._states.accept(segment, end, output)
        request.num_computed_tokens = computed
        output.named += self.kv.name_blocks(request, first, computed)
        # A block beyond the known tokens stays: each running request has one in reserve.
        self.kv.cut(request, request.num_tokens + self.kv.block_size)
        return computed == end
