"""K and V for modules that see sequences: mlx-lm's own cache, rebuilt from the store per segment.

A slow but general path for attention that the seam cannot handle.  Each segment's context is
gathered from the paged store into a cache of the model's own type.  The new rows of all segments
are then written back together.
"""

import copy
from functools import cache
from typing import Any

import numpy as np
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kv.row_format import RowFormat
from vllm_metal_lite.kv.store import PagedStore
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
    template: Any, layer: int, store: PagedStore, batch: ForwardBatch, seqs: SequenceBatch
) -> Any:
    """A cache of `template`'s type, with the context of the batch's only segment."""
    native = copy.copy(template)
    kind: Any = type(template)
    native.__class__ = _noting(kind)
    spec = store.specs[layer]
    native.rows = spec.k_row, spec.v_row
    if seqs.start:
        reach = _reach(template)
        positions = np.arange(max(seqs.start - reach, 0), seqs.start)
        count = len(positions)
        # In a full window the oldest token is out of sight, and its block may be reused.
        positions = np.maximum(positions, seqs.start - reach + 1)
        table = batch.block_tables[store.group_of[layer], seqs.segments[0]]
        slots = table[positions // batch.block_size] * batch.block_size
        slots = mx.array((slots + positions % batch.block_size).astype(np.int32))
        native.keys = _gather(store.keys[layer], spec.k_row, slots)
        native.values = _gather(store.values[layer], spec.v_row, slots)
        native.offset = seqs.start
        if isinstance(native, RotatingKVCache):
            native._idx = count
        elif isinstance(native, ChunkedKVCache):
            native.start_position = seqs.start - count
    return native


def _reach(template: Any) -> int:
    """The number of past tokens that the cache holds."""
    if isinstance(template, RotatingKVCache):
        return template.max_size
    return template.chunk_size if isinstance(template, ChunkedKVCache) else 1 << 62


def _gather(rows: mx.array, row: RowFormat, slots: mx.array) -> mx.array:
    """(num_slots, H, width) at slots (n,) as (1, H, n, D)."""
    if not row.dim:
        return mx.zeros((1, rows.shape[1], slots.size, 0), row.dtype)
    return row.unpack(rows[slots]).swapaxes(0, 1)[None]
