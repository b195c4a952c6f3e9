"""A packed step as batches of sequences, for MLX operations that take (B, L, ...).

The rows of a recurrent layer depend on each other.  So segments of one length form a *batch of
sequences*; all decodes are one.  A segment is cut at its checkpoints; its parts follow each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, ForwardBatch
from vllm_metal_lite.kv.state_store import Key, StateStore


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """B parts of segments, all of length L.

    segments (B,): the indices of the segments.  rows (B, L): their rows in the step.  start: the
    tokens computed before the rows of the first part.  initial_slots, final_slots (B,): as in
    ForwardBatch; initial_slots is None if all parts start from zeros.  part: how many parts of the
    same segments run before these.
    """

    index: int
    segments: np.ndarray
    rows: np.ndarray
    start: int
    initial_slots: np.ndarray | None
    final_slots: np.ndarray
    part: int

    @property
    def length(self) -> int:
        return self.rows.shape[1]


def sequence_batches(batch: ForwardBatch, alone: bool = False) -> list[SequenceBatch]:
    """Split a step into batches that cover every row once, in an order that respects parts.

    alone: one part per batch, in the order of their first positions.  A part that shares blocks
    with another one of the step then runs after the part that fills these blocks.
    """
    segments, part, begins, ends, initial, final = _parts(batch)
    lengths, fresh = ends - begins, initial == EMPTY_SLOT
    starts = batch.seq_lens[segments] - batch.cu_seqlens_q[segments + 1] + begins
    keys = np.stack([starts, segments] if alone else [part, lengths, ~fresh])
    order = np.lexsort(keys[::-1])
    edges = np.flatnonzero((np.diff(keys[:, order]) != 0).any(axis=0)) + 1
    return [
        SequenceBatch(
            index,
            segments[group],
            begins[group][:, None] + np.arange(lengths[group[0]], dtype=np.int32),
            int(starts[group[0]]),
            None if fresh[group[0]] else initial[group],
            final[group],
            int(part[group[0]]),
        )
        for index, group in enumerate(np.split(order, edges))
    ]


def _parts(batch: ForwardBatch) -> tuple[np.ndarray, ...]:
    """Returns (segments, part, begins, ends, initial, final), with an entry for each part."""
    cu = batch.cu_seqlens_q
    finals = np.stack(
        [np.arange(batch.num_segments, dtype=np.int32), cu[1:], batch.final_slots], axis=1
    )
    parts = np.concatenate([batch.checkpoints, finals])
    segments, ends, final = parts[np.lexsort((parts[:, 1], parts[:, 0]))].T
    first = np.diff(segments, prepend=-1) > 0
    begins = np.where(first, cu[segments], np.roll(ends, 1))
    initial = np.where(first, batch.initial_slots[segments], np.roll(final, 1))
    part = np.arange(len(segments)) - np.flatnonzero(first)[segments]
    return segments, part, begins, ends, initial, final


class BatchStates:
    """The states that the batches of one step read and write.  The store changes at `commit`."""

    def __init__(self, state_store: StateStore) -> None:
        self._state_store = state_store
        # Inner keys are indices of batches.  A later module may replace a state of an earlier one.
        self._new: dict[Key, dict[int, tuple[SequenceBatch, mx.array]]] = {}

    def get(self, seqs: SequenceBatch, key: Key) -> mx.array | None:
        """The states (B, ...) before a batch; None: zeros, or states that a later module sets."""
        if seqs.initial_slots is None:
            return None
        if seqs.part == 0:
            return self._state_store[key][mx.array(seqs.initial_slots)]
        at = {
            slot: state[i : i + 1]
            for earlier, state in self._new.get(key, {}).values()
            for i, slot in enumerate(earlier.final_slots.tolist())
        }
        slots = seqs.initial_slots.tolist()
        if not at.keys() >= set(slots):  # a later module of the layer sets some
            return None
        return mx.concatenate([at[slot] for slot in slots])

    def has(self, seqs: SequenceBatch, key: Key) -> bool:
        """Whether the states after a batch are known."""
        return seqs.index in self._new.get(key, ())

    def set(self, seqs: SequenceBatch, key: Key, state: mx.array) -> None:
        """Keep the states (B, ...) after a batch, in place of those kept before."""
        shape, now = self._state_store[key].shape[1:], state.shape[1:]
        if now != shape:  # an n-gram's context starts short
            front = [(full - part, 0) for full, part in zip(shape, now, strict=True)]
            state = mx.pad(state, [(0, 0), *front])
        self._new.setdefault(key, {})[seqs.index] = seqs, state

    def commit(self) -> None:
        """Write the new states to the store, once for each state, after all reads."""
        for key, of_batches in self._new.items():
            parts = of_batches.values()
            slots = np.concatenate([seqs.final_slots for seqs, _ in parts]).astype(np.int32)
            self._state_store.write(key, mx.array(slots), joined([state for _, state in parts]))
        self._new = {}


class RowOrder:
    """Converts packed rows to the sequences of batches, and back."""

    def __init__(self, batches: Sequence[SequenceBatch], num_rows: int) -> None:
        self.num_rows = num_rows
        self._index = [_index(seqs.rows.ravel()) for seqs in batches]
        order = np.concatenate([seqs.rows.ravel() for seqs in batches])
        self._place = None
        if (order != np.arange(len(order))).any():
            self._place = mx.array(np.argsort(order).astype(np.int32))

    def take(self, x: mx.array, seqs: SequenceBatch) -> mx.array:
        """Rows (N, ...) of a batch as (B, L, ...)."""
        return x[self._index[seqs.index]].reshape(*seqs.rows.shape, *x.shape[1:])

    def pack(self, parts: Sequence[mx.array]) -> mx.array:
        """Put the rows (B * L, ...) of all batches in the order of the step, and pad them."""
        rows = joined(parts)
        if self._place is not None:
            rows = rows[self._place]
        missing = self.num_rows - len(rows)
        if missing:
            rows = mx.concatenate([rows, mx.zeros((missing, *rows.shape[1:]), rows.dtype)])
        return rows


def joined(parts: Sequence[mx.array]) -> mx.array:
    """The parts concatenated along the first axis."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))


def _index(rows: np.ndarray) -> slice | mx.array:
    """The index of rows: a slice if they are consecutive, because a slice copies nothing."""
    first, count = int(rows[0]), len(rows)
    if (rows == np.arange(first, first + count)).all():
        return slice(first, first + count)
    return mx.array(rows)
