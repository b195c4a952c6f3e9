"""Finds the prefix that decodes of a step share: leading blocks common to their tables."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile


class SharedPrefixRows(NamedTuple):
    """leader: a row with the prefix.  lens: (B,) int32, the prefix length in tokens for rows with
    the prefix, 0 for the others."""

    leader: int
    lens: np.ndarray


class PrefixSearch:
    """`find_shared_prefix` with a cache: a result is used again while all rows begin with the same
    blocks.  So a longer prefix is found only when the set of rows changes.

    groups: the KV groups whose blocks must be shared; none: nothing is shared.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = groups
        self._found: SharedPrefixRows | None = None
        self._blocks: list[np.ndarray] = []
        self._min_saved = 0

    def __call__(self, batch: ForwardBatch, min_saved: int) -> SharedPrefixRows | None:
        """The prefix of a batch's decodes."""
        if not self._groups:
            return None
        decodes, size = slice(batch.num_decodes), batch.block_size
        tables = [batch.block_tables[group, decodes] for group in self._groups]
        seq_lens = batch.seq_lens[decodes]
        if self._min_saved != min_saved or not self._holds(tables, seq_lens, size):
            self._found = find_shared_prefix(tables, seq_lens, size, min_saved)
            width = 0 if self._found is None else int(self._found.lens.max()) // size
            self._blocks = [table[:, :width].copy() for table in tables]
            self._min_saved = min_saved
        return self._found

    def _holds(
        self, block_tables: Sequence[np.ndarray], seq_lens: np.ndarray, block_size: int
    ) -> bool:
        """Whether the last result holds for these rows."""
        if self._found is None or len(self._found.lens) != len(seq_lens):
            return False
        if (self._found.lens > (seq_lens - 1) // block_size * block_size).any():
            return False
        return all(
            np.array_equal(tables[:, : before.shape[1]], before)
            for tables, before in zip(block_tables, self._blocks, strict=True)
        )


def find_shared_prefix(
    block_tables: Sequence[np.ndarray], seq_lens: np.ndarray, block_size: int, min_saved: int
) -> SharedPrefixRows | None:
    """The prefix that saves the most token reads; None if the saving is below min_saved tokens.

    block_tables: (B, max_blocks), for one or more KV groups.  seq_lens: (B,).  The block of a row's
    last token is never shared: this step writes there.
    """
    rows = len(seq_lens)
    if rows < 2:
        return None
    own = (seq_lens - 1) // block_size
    # The shortest useful prefix, in blocks: the one that saves enough if all rows share it.  Rows
    # with a useful common prefix have the same block at its end.
    fewest = -(-min_saved // ((rows - 1) * block_size))
    long = np.flatnonzero(own >= fewest)
    if len(long) < 2 or len(np.unique(block_tables[0][long, fewest - 1])) == len(long):
        return None
    # Sorting by blocks makes rows that share a prefix adjacent.
    own = own[long]
    blocks = np.stack([tables[long, : own.max() + 1] for tables in block_tables], axis=-1)
    blocks[np.arange(len(long)), own] = -1  # rows that end here sort after rows that continue
    blocks = blocks.reshape(len(long), -1)
    order = np.argsort(blocks.view(f"V{blocks[0].nbytes}").ravel())
    blocks, own = blocks[order], own[order]
    differ = blocks[1:] != blocks[:-1]
    shared = np.where(differ.any(axis=1), differ.argmax(axis=1), differ.shape[1])
    shared = np.minimum(shared // len(block_tables), np.minimum(own[1:], own[:-1]))
    # In a run of rows that share `few` blocks, one row reads them for all.
    best, length, members, row_cost = min_saved, 0, long, profile().prefix_row_cost
    for few in np.unique(shared[shared >= fewest]):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], shared >= few, [0]))))
        run = int((edges[1::2] - edges[::2]).argmax())
        first, last = edges[2 * run], edges[2 * run + 1]
        saved = few * (last - first - rows * row_cost) * block_size
        if saved >= best:
            best, length, members = saved, few, long[order[first : last + 1]]
    if not length:
        return None
    lens = np.zeros(rows, np.int32)
    lens[members] = length * block_size
    return SharedPrefixRows(int(members.min()), lens)
