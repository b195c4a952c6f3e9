"""The arrays of a step, padded to sizes that repeat, so that compiled steps repeat."""

import numpy as np

from vllm_metal_lite.attention.base import Step, StepPlan
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import PAD_SLOT, ForwardBatch


def pad_rows(rows: np.ndarray, num_rows: int, value: int = 0) -> np.ndarray:
    """Pad (n, ...) to num_rows rows of `value`.  (np.pad takes ten times as long.)"""
    if len(rows) == num_rows:
        return rows
    out = np.full((num_rows, *rows.shape[1:]), value, rows.dtype)
    out[: len(rows)] = rows
    return out


def upload_padded(rows: np.ndarray, num_rows: int, value: int = 0) -> mx.array:
    """`pad_rows` on the device."""
    return mx.array(pad_rows(rows, num_rows, value))


def upload_tables(tables: np.ndarray, num_rows: int, width: int) -> mx.array:
    """Block tables cut or padded with zeros to (num_rows, width), on the device."""
    out = np.zeros((num_rows, width), tables.dtype)
    out[: len(tables), : tables.shape[1]] = tables[:, :width]
    return mx.array(out)


def make_step(
    batch: ForwardBatch, num_rows: int, plan: StepPlan, *, num_slots: int = 0, num_logits: int = 1
) -> Step:
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
    return Step(
        batch=batch,
        num_rows=num_rows,
        token_ids=upload_padded(batch.token_ids, num_rows),
        positions=upload_padded(batch.positions, num_rows),
        slot_mapping=slot_mapping,
        num_live=mx.array([batch.num_tokens], mx.int32),
        logits_indices=logits_indices,
        plan=plan,
        pools=batch.pooled is not None,
    )
