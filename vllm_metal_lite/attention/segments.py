"""Cuts a ForwardBatch into other segments for attention.

Attention reads only the fields that are cut.  The others still describe the whole step.
"""

from dataclasses import replace

import numpy as np

from vllm_metal_lite.batch.forward_batch import ForwardBatch


def prompts_of(batch: ForwardBatch, first: int) -> ForwardBatch:
    """The segments from `first` on as a batch of prompts, with rows counted from 0."""
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
    )


def split_at_chunks(batch: ForwardBatch, attention_chunk: int) -> ForwardBatch:
    """The same rows, with segments cut at positions that are multiples of `attention_chunk`."""
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
    """Every row as its own segment, which sees the keys up to itself.

    Rows of one original segment read keys that this same step writes.
    """
    return replace(split_at_chunks(batch, 1), num_decodes=batch.num_tokens)
