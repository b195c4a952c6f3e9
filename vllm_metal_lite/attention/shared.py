"""Which decodes of a step share how long a prefix: leading blocks common to their tables."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_metal_lite import backend

# Fewest tokens that need not be read again for which a prefix is attended to on its own: that costs
# two launches a layer, `shared_prefix` and the `rope_write` that attention could do otherwise.  On
# CUDA launches keep the host busy longer than 90,000 tokens keep an H200 (docs/benchmarks.md).
MIN_SAVED_TOKENS = 1 << 17 if backend.name() == "cuda" else 8192
# What a row costs there, whether it has the prefix or not: products, and keys from the cache.  As a
# share of reading the prefix; a guess.
_ROW_COST = 1 / 8


class CommonPrefix(NamedTuple):
    """leader: a row that has the prefix.  lens: (B,) int32, its length in tokens for each row that
    has it, 0 for the others."""

    leader: int
    lens: np.ndarray


def common_prefix(
    block_tables: Sequence[np.ndarray], seq_lens: np.ndarray, block_size: int
) -> CommonPrefix | None:
    """The prefix for which most tokens need not be read again; None if none is worth it.

    block_tables: (B, max_blocks), of one KV group or several.  seq_lens: (B,).  The block of a
    row's last token is its own: this step writes there.
    """
    rows = len(seq_lens)
    if rows < 2:
        return None
    own = (seq_lens - 1) // block_size
    # A prefix of all rows would need so many blocks.  Rows that share one share the last of these.
    fewest = -(-MIN_SAVED_TOKENS // ((rows - 1) * block_size))
    long = np.flatnonzero(own >= fewest)
    if len(long) < 2:
        return None
    last = block_tables[0][long, fewest - 1]
    counts = (last[:, None] == last).sum(axis=1)
    most = int(counts.argmax())
    if counts[most] < 2:
        return None
    leader = int(long[most])
    width = int(own[leader])
    shared = own
    for tables in block_tables:
        same = tables[:, :width] == tables[leader, :width]
        shared = np.minimum(shared, np.where(same.all(axis=1), width, same.argmin(axis=1)))
    # With the k rows that share most: what the last of them shares is read once instead of k times.
    lengths = np.sort(shared)[::-1]
    saved = lengths * (np.arange(rows) - rows * _ROW_COST) * block_size
    best = int(saved.argmax())
    if saved[best] < MIN_SAVED_TOKENS:
        return None
    lens = np.where(shared >= lengths[best], lengths[best] * block_size, 0)
    return CommonPrefix(leader, lens.astype(np.int32))
