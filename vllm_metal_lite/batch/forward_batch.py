"""What one forward pass works on.

`InputBatch` is the persistent host table of the running requests (one row each, at its
`req_index`); `InputBatch.pack` cuts a step's `ForwardBatch` out of it with numpy, with no loop over
requests.  Both front doors (the embedded engine and the vLLM plugin) fill the same table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

PAD_SLOT = -1  # slot_mapping value of a row whose K and V are written nowhere

# A token that a step under way samples: it is on the device, and not on the host yet.
UNKNOWN_TOKEN = -1

_NONE = np.zeros(0, np.int32)
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """S segments (one a request) packed into N rows, decode rows (segments of length 1) first.

    token_ids, positions, slot_mapping: (N,) int32.  cu_seqlens_q: (S+1,) int32.  Of the leading
    segments of length 1, some may have UNKNOWN_TOKEN, which the step before samples.
    seq_lens: (S,) int32, context including this step's tokens.
    block_tables: (S, max_blocks) int32; entries behind a window mean nothing.
    req_indices: (S,) rows of the InputBatch (the requests' seats), by which recurrent layers find
    their state.  num_decodes: leading segments of length 1.
    logits_indices: (T + P,) int32 rows that get logits: first the last row of each *terminal*
    segment (one that reaches the last token known), then the rows whose successor's
    prompt log-probability is wanted.
    sample_segments: (T,) int32, the terminal segments, in order.
    prompt_targets: (P,) int32, the token each of the P extra rows is scored on;
    prompt_segments: (P,) int32, its segment.
    others: where layers form several KV groups (kv/groups.py), the same step for each group behind
    the first: other slot_mapping and block_tables, all else the same.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    req_indices: np.ndarray
    block_size: int
    num_decodes: int
    logits_indices: np.ndarray
    sample_segments: np.ndarray
    prompt_targets: np.ndarray
    prompt_segments: np.ndarray
    others: tuple["ForwardBatch", ...] = ()

    @property
    def by_group(self) -> tuple["ForwardBatch", ...]:
        """The step as each KV group sees it."""
        return (self, *self.others)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_segments(self) -> int:
        return len(self.seq_lens)

    def prefills(self) -> "ForwardBatch":
        """The segments behind the decodes as a batch of their own, its rows counted from 0."""
        first, rows = self.num_decodes, slice(int(self.cu_seqlens_q[self.num_decodes]), None)
        return replace(
            self,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slot_mapping=self.slot_mapping[rows],
            cu_seqlens_q=self.cu_seqlens_q[first:] - rows.start,
            seq_lens=self.seq_lens[first:],
            block_tables=self.block_tables[first:],
            req_indices=self.req_indices[first:],
            num_decodes=0,
            # What is sampled is the whole step's business.
            logits_indices=_NONE,
            sample_segments=_NONE,
            prompt_targets=_NONE,
            prompt_segments=_NONE,
            others=tuple(other.prefills() for other in self.others),
        )

    def as_decodes(self) -> "ForwardBatch":
        """For attention: every row as a segment of its own, which sees the keys up to its own.

        Rows that were one segment see each other's keys, which this step writes.
        """
        lengths, rows = np.diff(self.cu_seqlens_q), np.arange(self.num_tokens, dtype=np.int32)
        return replace(
            self,
            cu_seqlens_q=np.arange(self.num_tokens + 1, dtype=np.int32),
            seq_lens=np.repeat(self.seq_lens - self.cu_seqlens_q[1:], lengths) + rows + 1,
            block_tables=np.repeat(self.block_tables, lengths, axis=0),
            req_indices=np.repeat(self.req_indices, lengths),
            num_decodes=self.num_tokens,
            others=tuple(other.as_decodes() for other in self.others),
        )

    @property
    def reads_new_rows(self) -> bool:
        """Whether one of the decodes sees what another one writes in this step: the end of a block
        that is shared at once (`KVCacheManager.publish`; only whole blocks are shared)."""
        decodes = slice(self.num_decodes)
        seq_lens = self.seq_lens[decodes]
        whole = np.flatnonzero(seq_lens % self.block_size == 0)
        if not len(whole):
            return False
        last = seq_lens[whole] // self.block_size - 1
        longer = seq_lens[:, None] > seq_lens[whole]
        tables = [batch.block_tables[decodes] for batch in self.by_group]
        return any((longer & (t[:, last] == t[whole, last])).any() for t in tables)

    def validate(self, *num_blocks: int) -> None:
        """Raise ValueError before anything is computed; `num_blocks` of each KV group bound the
        store.

        An index outside the store would corrupt memory rather than fail, so it is caught here.
        """
        cu, n = self.cu_seqlens_q, self.num_tokens
        q_lens = np.diff(cu)
        if len(cu) < 2 or cu[0] != 0 or cu[-1] != n or q_lens.min() <= 0:
            raise ValueError(
                f"cu_seqlens_q must start at 0, rise strictly and end at {n} rows, "
                f"got {cu.tolist()[:16]}"
            )
        if len(cu) != self.num_segments + 1 or len(self.block_tables) != self.num_segments:
            raise ValueError(
                f"{len(cu) - 1} segments in cu_seqlens_q, {self.num_segments} in seq_lens, "
                f"{len(self.block_tables)} in block_tables"
            )
        if (self.seq_lens < q_lens).any():
            raise ValueError("a segment has more rows than its seq_lens")
        if (q_lens[: self.num_decodes] != 1).any():
            raise ValueError(f"the first {self.num_decodes} segments must be decodes (one row)")
        for name in ("positions", "slot_mapping"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {n} rows")
        if len(num_blocks) != len(self.by_group):
            raise ValueError(f"{len(self.by_group)} KV groups, the store has {len(num_blocks)}")
        for batch, count in zip(self.by_group, num_blocks, strict=True):
            batch._validate_blocks(count)
        rows = self.logits_indices
        if len(rows) and (rows.min() < 0 or rows.max() >= n):
            raise ValueError(f"logits_indices points outside the {n} rows")

    def _validate_blocks(self, num_blocks: int) -> None:
        num_slots = num_blocks * self.block_size
        if self.slot_mapping.min() < PAD_SLOT or self.slot_mapping.max() >= num_slots:
            raise ValueError(f"slot_mapping points outside the store of {num_slots} slots")
        blocks_used = -(-self.seq_lens // self.block_size)
        if blocks_used.max() > self.block_tables.shape[1]:
            raise ValueError("a block table is shorter than its sequence")
        used = np.arange(self.block_tables.shape[1]) < blocks_used[:, None]
        tables = self.block_tables[used]
        if tables.min() < 0 or tables.max() >= num_blocks:
            raise ValueError(f"block_tables points outside the store of {num_blocks} blocks")


class InputBatch:
    """Host table of running requests: tokens, lengths and block tables, one row a request.

    Rows are handed out by `add` and given back by `remove`; everything a step needs is then cut
    out by index.  Arrays are int32; `token_ids` is (max_num_seqs, max_model_len), `block_tables`
    (num_kv_groups, max_num_seqs, max_blocks).
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_kv_groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        # First prompt position whose successor's log-probability is wanted.
        self.prompt_logprobs_from = np.full(max_num_seqs, _NEVER, np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = np.zeros((num_kv_groups, max_num_seqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(
        self,
        token_ids: np.ndarray | list[int],
        num_prompt_tokens: int,
        prompt_logprobs_from: int | None = None,
    ) -> int:
        """Take a row for a request with all its tokens known so far; returns its req_index."""
        row = self._free_rows.pop()
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens
        if prompt_logprobs_from is not None:
            self.prompt_logprobs_from[row] = prompt_logprobs_from
        self.num_blocks[row] = 0
        return row

    def remove(self, req_index: int) -> None:
        """Give a row back."""
        self.num_tokens[req_index] = 0
        self.prompt_logprobs_from[req_index] = _NEVER
        self._free_rows.append(req_index)

    def append_blocks(self, req_index: int, *block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a request's block tables: as many to that of each KV group."""
        start = self.num_blocks[req_index]
        end = start + len(block_ids[0])
        for table, blocks in zip(self.block_tables, block_ids, strict=True):
            table[req_index, start:end] = blocks
        self.num_blocks[req_index] = end

    def append_tokens(self, req_indices: np.ndarray, token_ids: np.ndarray) -> None:
        """Add one sampled token to each request; at the context's end there is no room, so none."""
        at = self.num_tokens[req_indices]
        room = at < self.token_ids.shape[1]
        if not room.all():
            req_indices, at, token_ids = req_indices[room], at[room], token_ids[room]
        self.token_ids[req_indices, at] = token_ids
        self.num_tokens[req_indices] = at + 1

    def fill_tokens(self, req_indices: np.ndarray, token_ids: np.ndarray) -> None:
        """Put tokens in the place of an UNKNOWN_TOKEN at the end; a row that ends otherwise has
        been given to another request since, and is left alone."""
        at = self.num_tokens[req_indices] - 1
        last = self.token_ids[req_indices, at]
        self.token_ids[req_indices, at] = np.where(last == UNKNOWN_TOKEN, token_ids, last)

    def pack(
        self, req_indices: np.ndarray, num_computed: np.ndarray, num_scheduled: np.ndarray
    ) -> ForwardBatch:
        """Cut a step out of the table.

        req_indices, num_computed, num_scheduled: (S,) int; segments of length 1 must come first.
        """
        bs = self.block_size
        q_lens = num_scheduled.astype(np.int32)
        cu = np.zeros(len(q_lens) + 1, np.int32)
        np.cumsum(q_lens, out=cu[1:])
        segment = np.repeat(np.arange(len(q_lens), dtype=np.int32), q_lens)
        positions = num_computed.astype(np.int32)[segment]
        positions += np.arange(cu[-1], dtype=np.int32) - cu[segment]
        row = req_indices[segment]
        seq_lens = (num_computed + num_scheduled).astype(np.int32)
        block, offset = np.divmod(positions, bs)
        terminal = np.flatnonzero(seq_lens == self.num_tokens[req_indices]).astype(np.int32)

        scored = prompt_targets = prompt_segments = _NONE
        if (self.prompt_logprobs_from[req_indices] < _NEVER).any():
            successor = positions + 1
            scored = np.flatnonzero(
                (positions >= self.prompt_logprobs_from[row])
                & (successor < self.num_prompt_tokens[row])
            ).astype(np.int32)
            prompt_targets = self.token_ids[row[scored], successor[scored]]
            prompt_segments = segment[scored]
        max_blocks = -(-int(seq_lens.max()) // bs)
        slots, *other_slots = (t[row, block] * bs + offset for t in self.block_tables)
        tables, *other_tables = (t[req_indices, :max_blocks] for t in self.block_tables)
        batch = ForwardBatch(
            token_ids=self.token_ids[row, positions],
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=cu,
            seq_lens=seq_lens,
            block_tables=tables,
            req_indices=req_indices.astype(np.int32),
            block_size=bs,
            num_decodes=int((np.cumprod(q_lens == 1)).sum()),
            logits_indices=np.concatenate([cu[1:][terminal] - 1, scored]),
            sample_segments=terminal,
            prompt_targets=prompt_targets,
            prompt_segments=prompt_segments,
        )
        if not other_slots:
            return batch
        others = zip(other_slots, other_tables, strict=True)
        return replace(
            batch,
            others=tuple(replace(batch, slot_mapping=s, block_tables=t) for s, t in others),
        )
