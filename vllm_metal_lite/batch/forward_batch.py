"""Host-side description of one forward pass: its tokens, and where their K and V lie."""

from dataclasses import dataclass, field

import numpy as np

from vllm_metal_lite.batch.pictures import PictureRows

PAD_SLOT = -1  # slot_mapping value of a row whose K and V are not kept

# A token that a step in flight samples: the host does not have it yet.
UNKNOWN_TOKEN = -1

# In draft_token_ids: no draft follows this row.
NO_DRAFT = -1

# A draft by the drafter: the host does not have its token yet.
UNKNOWN_DRAFT = -2

# The initial state slot of a segment that starts from zeros.
EMPTY_SLOT = -1


@dataclass(frozen=True, slots=True)
class SegmentState:
    """The slots of a segment's recurrent state.

    initial: the slot that is read at the start, or EMPTY_SLOT.  final: the slot that is written at
    the end.  checkpoints: (position, slot) pairs; `slot`, which may be `initial`, takes the state
    after the request's first `position` tokens, for other requests or for drafts that fail.
    """

    initial: int
    final: int
    checkpoints: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The hidden states that a step reads for pooling requests.

    segments: (Q,) int32, the segment of each range.
    ranges: (Q, 2) int32, first packed row and end; the hidden states of these rows are summed.
    samples_nothing: whether no row of the step needs a token.
    """

    segments: np.ndarray
    ranges: np.ndarray
    samples_nothing: bool


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """S segments (one per request) packed into N rows, decode rows (segments of length 1) first.

    token_ids, positions: (N,) int32.  cu_seqlens_q: (S+1,) int32.  A decode may hold UNKNOWN_TOKEN
    while the previous step is still sampling it.
    seq_lens: (S,) int32, context including this step's tokens.
    block_tables: (num_kv_groups, S, max_blocks) int32 (scheduler/kv_groups.py); entries of
    blocks that a window has left are meaningless.
    req_indices: (S,) int32, the requests' seats in the InputBatch.  num_decodes: leading
    segments of length 1; 0 in a step with drafts, so that its shapes repeat.
    initial_slots, final_slots: (S,) int32, where recurrent layers read the state before a segment
    (EMPTY_SLOT: zeros), and write the state after it.  checkpoints: (C, 3) int32, (segment, packed
    row, slot): `slot` also takes the state before this row, which is not the segment's first.
    logits_indices: (T + P,) int32, rows that get logits: first the last row of each *terminal*
    segment (one that reaches the last known token) and the rows of its drafts, then the rows that
    score the next prompt token for prompt log-probabilities.
    sample_segments: (T,) int32, the terminal segment of each sampled row.
    draft_token_ids: (T,) int32, the draft that the row after this one holds, or NO_DRAFT after the
    last row of a segment; empty for a step without drafts.  All its drafts may be UNKNOWN_DRAFT.
    next_token_ids: (N,) int32, the token after each row, where it is known.
    prompt_targets: (P,) int32, the token that each of the P extra rows scores;
    prompt_segments: (P,) int32, the segment of each.
    pooled: the rows that pooling requests read; None if the step has none.
    rotary_positions: (N,) int32, what rotates each row, if that differs from `positions`.
    pictures: None for a step without rows of pictures.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    req_indices: np.ndarray
    block_size: int
    num_decodes: int
    logits_indices: np.ndarray
    sample_segments: np.ndarray
    next_token_ids: np.ndarray
    prompt_targets: np.ndarray
    prompt_segments: np.ndarray
    initial_slots: np.ndarray
    final_slots: np.ndarray
    checkpoints: np.ndarray
    draft_token_ids: np.ndarray
    pooled: PooledRows | None = None
    rotary_positions: np.ndarray | None = None
    pictures: PictureRows | None = None

    def slot_mapping(self, group: int = 0) -> np.ndarray:
        """(N,) int32, where the K and V of each row go: its place in the group's block table."""
        segments = np.repeat(np.arange(self.num_segments), np.diff(self.cu_seqlens_q))
        block, offset = np.divmod(self.positions, self.block_size)
        return self.block_tables[group, segments, block] * self.block_size + offset

    @property
    def spans(self) -> np.ndarray | None:
        """PictureRows.spans; None: rows see only what comes before."""
        return None if self.pictures is None else self.pictures.spans

    @property
    def sampled_seats(self) -> np.ndarray:
        """(T,) int32, `req_indices` of the sampled rows."""
        return self.req_indices[self.sample_segments]

    @property
    def cu_sampled(self) -> np.ndarray:
        """(terminal segments + 1,) int: the i-th has the sampled rows cu_sampled[i] to [i + 1]."""
        return np.flatnonzero(np.diff(self.sample_segments, prepend=-1, append=-1))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_segments(self) -> int:
        return len(self.seq_lens)

    def validate(self, *num_blocks: int, num_state_slots: int = 0) -> None:
        """Raise ValueError for a block or a state slot outside the store, an empty segment, or a
        span outside its segment.

        num_blocks: the blocks of each KV group in the store.  num_state_slots: the slots of
        recurrent states; 0: there is none.
        An index outside the store would corrupt memory without an error on the device.
        """
        q_lens = np.diff(self.cu_seqlens_q)
        if q_lens.min() <= 0:
            raise ValueError(f"segment {q_lens.argmin()} has {q_lens.min()} rows")
        if len(num_blocks) != len(self.block_tables):
            raise ValueError(f"{len(self.block_tables)} KV groups, the store has {len(num_blocks)}")
        for tables, count in zip(self.block_tables, num_blocks, strict=True):
            self._validate_blocks(tables, count)
        if self.spans is not None:
            self._validate_spans(self.spans)
        if num_state_slots:
            self._validate_slots(num_state_slots)

    def _validate_spans(self, spans: np.ndarray) -> None:
        (begin, end), at = spans.T, self.positions
        num_keys = np.repeat(self.seq_lens, np.diff(self.cu_seqlens_q))
        if (wrong := (begin < 0) | (begin > at) | (end <= at) | (end > num_keys)).any():
            i = wrong.argmax()
            raise ValueError(
                f"row {i} sees positions {begin[i]} to {end[i]}: a span has its row's position, "
                f"{at[i]}, and ends within the {num_keys[i]} tokens of its segment"
            )

    def _validate_slots(self, num_slots: int) -> None:
        initial, numbers = self.initial_slots, np.arange(self.num_segments)
        if not len(initial) == len(self.final_slots) == self.num_segments:
            raise ValueError(
                f"{self.num_segments} segments have {len(initial)} initial and "
                f"{len(self.final_slots)} final state slots"
            )
        starts = self.seq_lens - np.diff(self.cu_seqlens_q)
        if (wrong := (starts == 0) != (initial == EMPTY_SLOT)).any():
            i = wrong.argmax()
            raise ValueError(
                f"segment {i} starts at position {starts[i]} from state slot {initial[i]}: a "
                f"segment starts from none ({EMPTY_SLOT}) exactly at position 0"
            )
        segments, rows, slots = self.checkpoints.T
        if len(segments) and not 0 <= segments.min() <= segments.max() < self.num_segments:
            raise ValueError(
                f"a checkpoint names none of the {self.num_segments} segments: they name "
                f"{segments.min()} to {segments.max()}"
            )
        written = np.concatenate([self.final_slots, slots])
        used = np.concatenate([initial, written])
        if used.min() < EMPTY_SLOT or written.min() < 0 or used.max() >= num_slots:
            raise ValueError(
                f"state slots {used.min()} to {used.max()}, written ones from {written.min()} on, "
                f"point outside the state store of {num_slots}"
            )
        if len(np.unique(written)) < len(written):
            raise ValueError(f"two states would be written to one slot of {written.tolist()[:16]}")
        owners = np.concatenate([numbers, segments])
        taken = ((initial[:, None] == written) & (owners != numbers[:, None])).any(axis=1)
        if taken.any():
            i = taken.argmax()
            raise ValueError(
                f"segment {i} reads state slot {initial[i]}, another segment writes it"
            )
        first, end = self.cu_seqlens_q[segments], self.cu_seqlens_q[segments + 1]
        if (outside := (rows <= first) | (rows >= end)).any():
            i = outside.argmax()
            raise ValueError(
                f"a checkpoint before row {rows[i]} is outside its segment, rows {first[i]} to "
                f"{end[i] - 1}"
            )

    def _validate_blocks(self, tables: np.ndarray, num_blocks: int) -> None:
        blocks_used = -(-self.seq_lens // self.block_size)
        if blocks_used.max() > tables.shape[1]:
            raise ValueError(
                f"a sequence has {blocks_used.max()} blocks, the block tables {tables.shape[1]}"
            )
        used = tables[np.arange(tables.shape[1]) < blocks_used[:, None]]
        if used.min() < 0 or used.max() >= num_blocks:
            raise ValueError(
                f"block_tables {used.min()} to {used.max()} points outside the store of "
                f"{num_blocks} blocks"
            )
