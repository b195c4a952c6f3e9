"""K and V for modules that see sequences: mlx-lm's own cache, rebuilt from the store per segment.

A slow but general path for attention that the seam cannot handle.  Each segment's context is
gathered from the paged store into a cache of the model's own type.  The new rows of all segments
are written to the store together, after the last segment.  A segment that shares blocks with an
earlier segment of the same step takes the rows of that segment instead of the store's.
"""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.row_format import RowFormat
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.seam.sequences import SequenceStep
from vllm_metal_lite.recurrence.sequence_batches import SequenceBatch

NATIVE_TYPES = (KVCache, RotatingKVCache, ChunkedKVCache)


@cache
def _noting(base: Any) -> type:
    """A subclass of a cache type that records the rows it receives, (1, H, L, D)."""

    def update_and_fetch(self: Any, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        if self.written is not None:
            raise NotImplementedError("a layer that writes its K and V twice")
        self.written = k, v
        # Round now, so that this step sees the values that later steps read from the store.
        k, v = (row.rounded(a) for row, a in zip(self.rows, (k, v), strict=True))
        return base.update_and_fetch(self, k, v)

    methods = {"update_and_fetch": update_and_fetch, "written": None, "rows": ()}
    return type(base.__name__, (base,), methods)


def rebuild(
    template: Any,
    layer: int,
    store: PagedStore,
    steps: SequenceStep,
    seqs: SequenceBatch,
    earlier: Sequence[tuple[mx.array, mx.array]],
) -> Any:
    """A cache of `template`'s type, with the context of the batch's only segment.

    earlier: K and V (1, H, L, D) of the batches before, if the store does not have them yet.
    """
    native = copy.copy(template)
    kind: Any = type(template)
    native.__class__ = _noting(kind)
    spec, stored = store.specs[layer], (store.keys[layer], store.values[layer])
    native.rows = spec.k_row, spec.v_row
    if not seqs.start:
        return native
    group, reach = store.group_of[layer], _reach(template)
    key = seqs.index, group, reach
    if key not in steps.contexts:
        steps.contexts[key] = _context(steps, seqs, group, reach)
    slots, order = steps.contexts[key]
    context = [_gather(rows, row, slots) for rows, row in zip(stored, native.rows, strict=True)]
    if order is not None and earlier:
        for i, row in enumerate(native.rows):
            new = row.rounded(mx.concatenate([written[i] for written in earlier], axis=2))
            context[i] = mx.concatenate([context[i], new], axis=2)[:, :, order]
    native.keys, native.values = context
    native.offset = seqs.start
    if isinstance(native, RotatingKVCache):
        native._idx = slots.size
    elif isinstance(native, ChunkedKVCache):
        native.start_position = seqs.start - slots.size
    return native


def _context(
    steps: SequenceStep, seqs: SequenceBatch, group: int, reach: int
) -> tuple[mx.array, mx.array | None]:
    """Returns (the slots (n,) of the context of the batch's only segment, order).

    order: None if no earlier batch of the step writes to these slots.  Otherwise (n,): where each
    row of the context is, if the rows of the earlier batches follow the n rows from the store.
    """
    batch, start = steps.step.batch, seqs.start
    positions = np.arange(max(start - reach, 0), start)
    # In a full window the oldest token is out of sight, and its block may be reused.
    block, offset = np.divmod(np.maximum(positions, start - reach + 1), batch.block_size)
    table = batch.block_tables[group, seqs.segments[0]]
    slots = (table[block] * batch.block_size + offset).astype(np.int32)
    rows = [earlier.rows.ravel() for earlier in steps.batches[: seqs.index]]
    written = batch.slot_mapping(group)[np.concatenate(rows)] if rows else slots[:0]
    if not (found := np.isin(slots, written)).any():
        return mx.array(slots), None
    order, by_slot = np.arange(len(slots)), np.argsort(written)
    place = by_slot[np.searchsorted(written, slots[found], sorter=by_slot)]
    order[found] = len(slots) + place
    return mx.array(slots), mx.array(order.astype(np.int32))


def _reach(template: Any) -> int:
    """The number of past tokens that the cache holds."""
    if isinstance(template, RotatingKVCache):
        return template.max_size
    return template.chunk_size if isinstance(template, ChunkedKVCache) else 1 << 62


def _gather(rows: mx.array, row: RowFormat, slots: mx.array) -> mx.array:
    """Take the rows at slots (n,) out of (num_slots, H, width), as (1, H, n, D)."""
    if not row.dim:
        return mx.zeros((1, rows.shape[1], slots.size, 0), row.dtype)
    return row.unpack(rows[slots]).swapaxes(0, 1)[None]
