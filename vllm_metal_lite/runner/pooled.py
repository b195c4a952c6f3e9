"""Reads hidden states and logits of a step for pooling requests."""

from typing import NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import PooledRows


class Pooled(NamedTuple):
    """sums: (Q, hidden_size) float32, one row a range.  logits: (L, K) float32.  See PooledRows."""

    sums: mx.array
    logits: mx.array


def pool(rows: PooledRows, hidden: mx.array, logits: mx.array) -> Pooled:
    """hidden: (N, 1, hidden_size), what the model's head sees; N may include padding.
    logits: (R, vocab_size), sampled rows first."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    first, end = rows.ranges[:, 0], rows.ranges[:, 1]
    if (end - first == 1).all():
        sums = hidden[mx.array(first)].astype(mx.float32)
    else:
        parts = [hidden[a:b].astype(mx.float32).sum(axis=0) for a, b in rows.ranges.tolist()]
        sums = mx.stack(parts)
    if not len(rows.scored):
        return Pooled(sums, mx.zeros((0, 0)))
    wanted = np.broadcast_to(rows.score_rows[:, None], rows.score_token_ids.shape)
    return Pooled(sums, logits[mx.array(wanted), mx.array(rows.score_token_ids)].astype(mx.float32))
