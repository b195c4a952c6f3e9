"""Runs modules that must see sequences inside a packed forward.

Some recurrent layers compute with their states in ways that `recurrence/` does not know: Mamba 1,
RWKV 7, lightning attention, n-gram contexts.  Such a module is called once per batch of sequences
(recurrence/sequence_batches.py): segments of one length, as (B, L, ...), with the caches that
mlx-lm itself would pass.  All decodes form one batch.  The rest of the model sees packed rows.

Attention that the seam cannot handle (computed without SDPA, for example) uses the same path.
Then each segment is its own batch, with its context gathered from the store (kv_segments.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mlx.utils import tree_map

from vllm_metal_lite.attention.base import DeviceBatch
from vllm_metal_lite.backend import leaves, mx
from vllm_metal_lite.kv.state_store import StateStore
from vllm_metal_lite.recurrence.sequence_batches import (
    BatchStates,
    RowOrder,
    SequenceBatch,
    sequence_batches,
)


class SequenceStep:
    """One packed step as batches of sequences: converts rows to sequences and back.

    alone: each segment is a batch, because attention reads the store.
    """

    def __init__(self, step: DeviceBatch, state_store: StateStore, alone: bool) -> None:
        self.step, self.alone = step, alone
        self.batches = sequence_batches(step.batch, alone)
        self.states = BatchStates(state_store)
        # For kv_segments.py, which computes the slots of a context once for all layers.
        self.contexts: dict[tuple, tuple[mx.array, mx.array | None]] = {}
        self.rows = RowOrder(self.batches, step.num_rows)

    def to_sequences(self, x: mx.array, seqs: SequenceBatch) -> mx.array | int:
        """Packed rows (N, 1, ...) or (N, H, 1, D) of a batch as (B, L, ...) or (B, H, L, D).

        Positions (N,) become the start of each sequence.  Arrays without rows are returned as is.
        """
        if x is self.step.positions and len(seqs.rows) == 1:
            return seqs.start
        n, shape = self.step.num_rows, x.shape
        axis = next((a for a in (1, 2) if a < x.ndim and shape[a] == 1), None)
        if x.ndim == 0 or shape[0] != n or (x.ndim > 1 and axis is None):
            return x
        if x.ndim == 1:
            return x[mx.array(seqs.rows[:, 0])]
        rows = self.rows.take(x, seqs)
        if axis == 1:
            return rows.squeeze(2)
        return rows.squeeze(3).swapaxes(1, 2)

    def to_rows(self, parts: Sequence[Any]) -> Any:
        """A module's results for all batches, (B, L, ...) or (B, H, L, D), as packed rows."""
        if isinstance(parts[0], (tuple, list)):
            return type(parts[0])(self.to_rows(items) for items in zip(*parts, strict=True))
        if not isinstance(parts[0], mx.array):
            return parts[0]
        if self._holds_rows(parts, axis=1):
            return self.rows.pack([p.reshape(-1, 1, *p.shape[2:]) for p in parts])
        if self._holds_rows(parts, axis=2):
            return self.to_rows([p.swapaxes(1, 2) for p in parts]).swapaxes(1, 2)
        raise NotImplementedError("a result without one row per token")

    def _holds_rows(self, parts: Sequence[mx.array], axis: int) -> bool:
        pairs = zip(parts, self.batches, strict=True)
        return all(p.ndim > axis and p.shape[axis] == seqs.length for p, seqs in pairs)


class PackedCache:
    """A layer's cache during a packed forward, and the source of its native cache for a batch.

    sequences: the step as batches; None if no module sees sequences.
    """

    sequences: SequenceStep | None

    def native(self, seqs: SequenceBatch) -> Any:
        """The cache that mlx-lm itself would have before this batch."""
        raise NotImplementedError

    def keep(self, seqs: SequenceBatch, native: Any) -> None:
        """Take the batch's results from its native cache."""
        raise NotImplementedError

    def flush(self, out: Any) -> None:
        """Called when all batches are built.  out: their result."""

    @property
    def steps(self) -> SequenceStep:
        assert self.sequences is not None, "a module that sees sequences, in a step without them"
        return self.sequences


def call_by_batches(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module once per batch if it receives a packed cache, otherwise once, unchanged."""
    caches = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, PackedCache)]
    if not caches:
        return call(*args, **kwargs)
    steps, parts = caches[0].steps, []
    for seqs in steps.batches:
        natives = {id(c): c.native(seqs) for c in caches}
        of_batch = partial(_of_batch, seqs, steps, natives)
        positional, named = tree_map(of_batch, (args, kwargs))
        parts.append(call(*positional, **named))
        for cache in caches:
            cache.keep(seqs, natives[id(cache)])
    out = steps.to_rows(parts)
    for cache in caches:
        cache.flush(out)
    return out


def _of_batch(seqs: SequenceBatch, steps: SequenceStep, natives: dict[int, Any], value: Any) -> Any:
    """An argument as a batch sees it.  natives: the batch's caches by the id of the packed ones."""
    if isinstance(value, mx.array):
        return steps.to_sequences(value, seqs)
    if id(value) in natives:
        return natives[id(value)]
    return value.native(seqs) if hasattr(value, "native") else value
