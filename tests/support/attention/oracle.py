"""Paged attention by definition, in float64.  Tests compare every attention path with it."""

from itertools import pairwise

import numpy as np


def slots_of(blocks: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """The store's slots for the tokens of a sequence.  blocks: (..., num_blocks)."""
    return blocks[..., positions // block_size] * block_size + positions % block_size


def paged_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    block_tables: np.ndarray,
    cu_seqlens_q: np.ndarray,
    seq_lens: np.ndarray,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    spans: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of packed q (N, H, K) to a store keys (slots, H_kv, K), values (.., V).

    Row i of segment s is at position seq_lens[s] - q_len + i.  Returns (N, H, V) float64; rows of
    no segment, or of one without keys, are zeros.  Decodes have cu_seqlens_q = 0, 1, 2, ...
    spans: (N, 2), first and end of the keys that a row sees beside those.
    """
    q, keys, values = (a.astype(np.float64) for a in (q, keys, values))
    num_heads, group = q.shape[1], q.shape[1] // keys.shape[1]
    sinks = np.full(num_heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    out = np.zeros((*q.shape[:2], values.shape[2]))
    for s, (start, stop) in enumerate(pairwise(cu_seqlens_q)):
        if start == stop or not seq_lens[s]:
            continue
        row_at = seq_lens[s] - (stop - start) + np.arange(stop - start)
        # From the first key that any row sees: those before it may be anybody's.
        first = 0 if window is None else max(0, row_at[0] - window + 1)
        first = first if spans is None else min(first, spans[start, 0])
        key_at = np.arange(first, seq_lens[s])
        slots = slots_of(block_tables[s], key_at, block_size)
        seen = key_at <= row_at[:, None]
        if window is not None:
            seen &= key_at > row_at[:, None] - window
        if spans is not None:
            begin, end = spans[start:stop].T[:, :, None]
            seen |= (key_at >= begin) & (key_at < end)
        for h in range(num_heads):
            scores = q[start:stop, h] @ keys[slots, h // group].T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            scores = np.where(seen, scores, -np.inf)
            top = np.maximum(scores.max(axis=1, keepdims=True), sinks[h])
            weights = np.exp(scores - top)
            total = weights.sum(axis=1, keepdims=True) + np.exp(sinks[h] - top)
            out[start:stop, h] = weights / total @ values[slots, h // group]
    return out
