"""The persistent host table of running requests; builds each step from it."""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.batch.forward_batch import (
    EMPTY_SLOT,
    NO_DRAFT,
    UNKNOWN_TOKEN,
    ForwardBatch,
    SegmentState,
)

_NONE = np.zeros(0, np.int32)
_NO_CHECKPOINTS = np.zeros((0, 3), np.int32)


class InputBatch:
    """The host's table of running requests: tokens, lengths and block tables, one seat per request.

    `add` takes a seat, `remove` releases it, and `pack` gathers a step by index.  Arrays are int32;
    `token_ids` is (max_num_seqs, max_model_len), `block_tables` (num_kv_groups, max_num_seqs,
    max_blocks).
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_kv_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        # First prompt position that scores the next prompt token; num_prompt_tokens: none does.
        self.prompt_logprobs_from = np.zeros(max_num_seqs, np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = np.zeros((num_kv_groups, max_num_seqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))

    def add(
        self,
        token_ids: np.ndarray | list[int],
        num_prompt_tokens: int,
        prompt_logprobs_from: int | None = None,
    ) -> int:
        """Take a seat for a request with all its known tokens; returns its req_index."""
        seat = self._free_seats.pop()
        self.token_ids[seat, : len(token_ids)] = token_ids
        self.num_tokens[seat] = len(token_ids)
        self.num_prompt_tokens[seat] = num_prompt_tokens
        if prompt_logprobs_from is None:
            prompt_logprobs_from = num_prompt_tokens
        self.prompt_logprobs_from[seat] = prompt_logprobs_from
        self.num_blocks[seat] = 0
        return seat

    def remove(self, req_index: int) -> None:
        """Release a seat."""
        self.num_tokens[req_index] = 0
        self._free_seats.append(req_index)

    def append_blocks(self, req_index: int, *block_ids: Sequence[int]) -> None:
        """Append blocks to a request's block tables: the same number for each KV group."""
        start = self.num_blocks[req_index]
        end = start + len(block_ids[0])
        for table, blocks in zip(self.block_tables, block_ids, strict=True):
            table[req_index, start:end] = blocks
        self.num_blocks[req_index] = end

    def append_tokens(self, req_indices: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one sampled token to each request; drop it if the context is full."""
        at = self.num_tokens[req_indices]
        room = at < self.token_ids.shape[1]
        if not room.all():
            req_indices, at, token_ids = req_indices[room], at[room], token_ids[room]
        self.token_ids[req_indices, at] = token_ids
        self.num_tokens[req_indices] = at + 1

    def fill_tokens(self, req_indices: np.ndarray, token_ids: np.ndarray) -> None:
        """Replace a final UNKNOWN_TOKEN by the sampled token.  A seat without one stays unchanged:
        its context is full, or it was given back since."""
        at = self.num_tokens[req_indices] - 1
        unknown = (at >= 0) & (self.token_ids[req_indices, at] == UNKNOWN_TOKEN)
        self.token_ids[req_indices[unknown], at[unknown]] = token_ids[unknown]

    def replace_unknown(self, req_index: int, token_ids: Sequence[int]) -> None:
        """Replace one seat's final UNKNOWN_TOKEN by one or more tokens."""
        start = self.num_tokens[req_index] - 1
        if start < 0 or self.token_ids[req_index, start] != UNKNOWN_TOKEN:
            return
        end = start + len(token_ids)
        self.token_ids[req_index, start:end] = token_ids
        self.num_tokens[req_index] = end

    def set_tokens(self, req_index: int, start: int, token_ids: Sequence[int]) -> None:
        """Overwrite tokens from position `start` on; their number stays the same."""
        self.token_ids[req_index, start : start + len(token_ids)] = token_ids

    def pack(
        self,
        req_indices: np.ndarray,
        num_computed: np.ndarray,
        num_scheduled: np.ndarray,
        states: Sequence[SegmentState] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> ForwardBatch:
        """Gather a step from the table.

        req_indices, num_computed, num_scheduled: (S,) int; segments of length 1 must come first.
        states: the state slots of each segment; None: a request's slot is its seat.
        drafts: the drafts of each segment, behind the request's last known token.  They stay in the
        table until known tokens replace them.  None: no segment has any.
        """
        cu, segment, positions = _rows(num_computed, num_scheduled)
        seat, seq_lens = req_indices[segment], (num_computed + num_scheduled).astype(np.int32)
        if drafts is None:
            sample_segments = np.flatnonzero(seq_lens == self.num_tokens[req_indices])
            samples, draft_token_ids = cu[1:][sample_segments] - 1, _NONE
            num_decodes = int(np.cumprod(num_scheduled == 1).sum())
        else:
            num_drafts, num_decodes = self._write_drafts(req_indices, drafts), 0
            terminal = np.flatnonzero(seq_lens - num_drafts == self.num_tokens[req_indices])
            samples, sample_segments = _sampled_rows(cu, terminal, num_drafts)
            draft_token_ids = np.full(len(samples), NO_DRAFT, np.int32)
            has_draft = np.flatnonzero(sample_segments[1:] == sample_segments[:-1])
            drafted = samples[has_draft] + 1
            draft_token_ids[has_draft] = self.token_ids[seat[drafted], positions[drafted]]
        scored = self._scored_rows(seat, positions)
        after = np.minimum(positions + 1, self.token_ids.shape[1] - 1)
        max_blocks = -(-int(seq_lens.max()) // self.block_size)
        if states is None:
            initial = np.where(num_computed == 0, EMPTY_SLOT, req_indices)
            final, checkpoints = req_indices, _NO_CHECKPOINTS
        else:
            initial, final, checkpoints = _slots(states, cu, num_computed)
        return ForwardBatch(
            token_ids=self.token_ids[seat, positions],
            positions=positions,
            cu_seqlens_q=cu,
            seq_lens=seq_lens,
            block_tables=self.block_tables[:, req_indices, :max_blocks],
            req_indices=req_indices.astype(np.int32),
            block_size=self.block_size,
            num_decodes=num_decodes,
            logits_indices=np.concatenate([samples, scored]),
            sample_segments=sample_segments.astype(np.int32),
            next_token_ids=self.token_ids[seat, after],
            prompt_targets=self.token_ids[seat[scored], positions[scored] + 1],
            prompt_segments=segment[scored],
            initial_slots=initial.astype(np.int32),
            final_slots=final.astype(np.int32),
            checkpoints=checkpoints,
            draft_token_ids=draft_token_ids,
        )

    def _write_drafts(self, req_indices: np.ndarray, drafts: Sequence[Sequence[int]]) -> np.ndarray:
        """Write drafts after the last known tokens; returns the length of each."""
        for index, draft in zip(req_indices, drafts, strict=True):
            start = self.num_tokens[index]
            self.token_ids[index, start : start + len(draft)] = draft
        return np.array([len(draft) for draft in drafts], np.int32)

    def _scored_rows(self, seat: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The packed rows that score the next prompt token.  seat: the seat of each row."""
        first, end = self.prompt_logprobs_from[seat], self.num_prompt_tokens[seat]
        return np.flatnonzero((positions >= first) & (positions + 1 < end)).astype(np.int32)


def _rows(
    num_computed: np.ndarray, num_scheduled: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (cu_seqlens, the segment of each packed row, the position of each packed row),
    int32."""
    cu = np.zeros(len(num_scheduled) + 1, np.int32)
    np.cumsum(num_scheduled, out=cu[1:])
    segment = np.repeat(np.arange(len(num_scheduled), dtype=np.int32), num_scheduled)
    positions = num_computed.astype(np.int32)[segment]
    positions += np.arange(cu[-1], dtype=np.int32) - cu[segment]
    return cu, segment, positions


def _sampled_rows(
    cu_seqlens: np.ndarray, terminal: np.ndarray, num_drafts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The sampled rows: the last 1 + num_drafts packed rows of each terminal segment.  Also the
    segment of each of these rows."""
    counts = 1 + num_drafts[terminal]
    ends = np.cumsum(counts)
    segments = np.repeat(terminal, counts)
    behind = np.repeat(ends, counts) - np.arange(len(segments))  # rows to the segment's end
    return (cu_seqlens[1:][segments] - behind).astype(np.int32), segments


def _slots(
    states: Sequence[SegmentState], cu_seqlens: np.ndarray, num_computed: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (initial_slots, final_slots, checkpoints) of a ForwardBatch."""
    initial = np.array([state.initial for state in states], np.int32)
    final = np.array([state.final for state in states], np.int32)
    checkpoints = [
        (segment, cu_seqlens[segment] + position - num_computed[segment], slot)
        for segment, state in enumerate(states)
        for position, slot in state.checkpoints
    ]
    return initial, final, np.array(checkpoints, np.int32).reshape(-1, 3)
