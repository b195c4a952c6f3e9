"""The arrays of a step: a batch cut into other segments, and arrays padded and uploaded.

Attention reads only the fields that a cut changes; the others still describe the whole step.
Arrays are padded to sizes that repeat, so that compiled steps repeat.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from vllm_metal_lite.attention.base import Attention, DeviceBatch, StepPictures
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import PAD_SLOT, ForwardBatch
from vllm_metal_lite.batch.pictures import NO_FEATURE, PictureRows


def prompts_of(batch: ForwardBatch, first: int) -> ForwardBatch:
    """Return a batch of the segments from `first` on; its rows count from 0."""
    rows = slice(int(batch.cu_seqlens_q[first]), None)
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        cu_seqlens_q=batch.cu_seqlens_q[first:] - rows.start,
        seq_lens=batch.seq_lens[first:],
        block_tables=batch.block_tables[:, first:],
        req_indices=batch.req_indices[first:],
        num_decodes=0,
        pictures=batch.pictures and batch.pictures.from_row(rows.start),
    )


def split_at_chunks(batch: ForwardBatch, attention_chunk: int) -> ForwardBatch:
    """Cut segments at positions that are multiples of `attention_chunk`; the rows stay the same."""
    starts = np.zeros(batch.num_tokens, bool)
    starts[batch.cu_seqlens_q[:-1]] = True
    starts |= batch.positions % attention_chunk == 0
    first = np.flatnonzero(starts)
    cu = np.append(first, batch.num_tokens).astype(np.int32)
    segment = np.searchsorted(batch.cu_seqlens_q, first, side="right") - 1
    return replace(
        batch,
        cu_seqlens_q=cu,
        seq_lens=batch.positions[cu[1:] - 1] + 1,
        block_tables=batch.block_tables[:, segment],
        req_indices=batch.req_indices[segment],
    )


def as_decodes(batch: ForwardBatch) -> ForwardBatch:
    """Make every row its own segment, which sees the keys up to itself.

    Rows of one original segment read keys that this same step writes.
    """
    return replace(split_at_chunks(batch, 1), num_decodes=batch.num_tokens)


def pad_rows(rows: np.ndarray, num_rows: int, value: int = 0) -> np.ndarray:
    """Pad (n, ...) to num_rows rows of `value`.  (np.pad takes ten times as long.)"""
    if len(rows) == num_rows:
        return rows
    out = np.full((num_rows, *rows.shape[1:]), value, rows.dtype)
    out[: len(rows)] = rows
    return out


def upload_padded(rows: np.ndarray, num_rows: int, value: int = 0) -> mx.array:
    """Pad rows as `pad_rows` does, and copy them to the device."""
    return mx.array(pad_rows(rows, num_rows, value))


def upload_tables(tables: np.ndarray, num_rows: int, width: int) -> mx.array:
    """Cut block tables, or pad them with zeros, to (num_rows, width), and copy them to the
    device."""
    out = np.zeros((num_rows, width), tables.dtype)
    out[: len(tables), : tables.shape[1]] = tables[:, :width]
    return mx.array(out)


def last_slots(tables: mx.array, seq_lens: mx.array, block_size: int) -> mx.array:
    """The slot of each sequence's last token, (S,) int32; PAD_SLOT for an empty one.

    tables: (S, W) block tables.  seq_lens: (S or more,) int32.
    """
    seq_lens = seq_lens[: len(tables)]
    last = mx.maximum(seq_lens - 1, 0)
    blocks = mx.take_along_axis(tables, (last // block_size)[:, None], axis=1).squeeze(1)
    return mx.where(seq_lens > 0, blocks * block_size + last % block_size, PAD_SLOT)


def resized(rows: mx.array, size: int, value: int = 0) -> mx.array:
    """Cut (n,), or pad it with `value`, to (size,)."""
    return mx.pad(rows[:size], (0, max(size - len(rows), 0)), constant_values=value)


def planned_earlier(attention: Attention, step: DeviceBatch) -> DeviceBatch:
    """The step with each row moved back, planned anew: the host waits for `back`."""
    if step.back is None:
        return step
    batch, back = step.batch, np.array(step.back)[: step.batch.num_tokens]
    rotary = None if batch.rotary_positions is None else batch.rotary_positions - back
    at, lens = batch.positions - back, batch.seq_lens - back
    batch = replace(batch, positions=at, seq_lens=lens, rotary_positions=rotary)
    plan = attention.prepare(batch, step.num_rows)
    moved = {"positions": plan.positions, "slot_mapping": plan.slot_mapping, "plan": plan.plan}
    return step._replace(batch=batch, back=None, **moved)


def make_step(
    batch: ForwardBatch, num_rows: int, plan: Any, *, num_slots: int = 0, num_logits: int = 1
) -> DeviceBatch:
    """Pad a batch's arrays and copy them to the device, beside the plan.

    num_slots: the fewest entries of slot_mapping.
    num_logits: the fewest rows that get logits, unless all rows do.
    """
    num_slots = max(num_rows, num_slots)
    slot_mapping = tuple(
        upload_padded(batch.slot_mapping(group), num_slots, PAD_SLOT)
        for group in range(len(batch.block_tables))
    )
    logits_indices = None
    if len(batch.sample_segments) < batch.num_tokens:
        # A step with no terminal segment samples nothing, but must name one row.  MLX never
        # computes that row's logits, because nothing reads them.
        wanted = batch.logits_indices
        logits_indices = upload_padded(wanted, max(len(wanted), num_logits))
    return DeviceBatch(
        batch=batch,
        num_rows=num_rows,
        token_ids=upload_padded(batch.token_ids, num_rows),
        positions=upload_padded(rotary_positions(batch), num_rows),
        slot_mapping=slot_mapping,
        num_live=mx.array([batch.num_tokens], mx.int32),
        logits_indices=logits_indices,
        plan=plan,
        returns_hidden=batch.pooled is not None,
        pictures=None if batch.pictures is None else _on_device(batch.pictures, num_rows),
    )


def rotary_positions(batch: ForwardBatch) -> np.ndarray:
    """(N,) int32, what rotates each row."""
    return batch.positions if batch.rotary_positions is None else batch.rotary_positions


def _on_device(pictures: PictureRows, num_rows: int) -> StepPictures:
    axes = pictures.axes
    return StepPictures(
        rows=upload_padded(pictures.rows, num_rows, NO_FEATURE),
        features=pictures.features,
        deep=pictures.deep,
        axes=None if axes is None else mx.stack([upload_padded(a, num_rows) for a in axes]),
    )
