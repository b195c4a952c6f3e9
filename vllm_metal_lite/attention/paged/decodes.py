"""The rows of a step that are attended to as decodes, and the prefix that these rows share."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.attention.step_arrays import as_decodes, upload_padded, upload_tables
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.decode import DecodePlan
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, power_of_two
from vllm_metal_lite.kernels.merge_partitions import num_splits
from vllm_metal_lite.kv.store import PagedStore

# Number of KV heads -> the plan of such layers.
Plans = dict[int, DecodePlan]


class SharedPrefixRows(NamedTuple):
    """The rows of a step that share a prefix.

    leader: one of these rows.  lens: (B,) int32, the length of the prefix in tokens, or 0 for a row
    without the prefix.
    """

    leader: int
    lens: np.ndarray


class SharedPrefixArrays(NamedTuple):
    """SharedPrefixRows on the device: leader (1,) and lens (num_rows,) int32.

    length: the largest power of two within the prefix.  plans: the plans for the keys after it.
    """

    length: int
    leader: mx.array
    lens: mx.array
    plans: Plans


class Decodes(NamedTuple):
    """The first num_rows rows of a step.  In a step of only decodes they include padded rows.

    block_tables (num_rows, W), one per KV group; seq_lens (num_rows,) int32, 0 for a padded row.
    W and the lengths of arrays are at least MIN_ELEMENTS.  plans: for all keys.
    """

    num_rows: int
    block_tables: tuple[mx.array, ...]
    seq_lens: mx.array
    plans: Plans
    prefix: SharedPrefixArrays | None


class DecodePlanner:
    """Plans the decodes of each step.

    shares: for each layer, whether it reads a shared prefix once.  splits: whether contexts may be
    split.  reads_once: whether a segment of few rows can read its keys once, in splits.
    """

    def __init__(
        self, store: PagedStore, shares: Sequence[bool], splits: bool, reads_once: bool
    ) -> None:
        self._kv_heads = sorted({keys.shape[1] for keys in store.keys})
        self._splits, self._reads_once = splits, reads_once
        groups = {g for g, shared in zip(store.group_of, shares, strict=True) if shared}
        self._shared_prefix = PrefixSearch(sorted(groups))

    def __call__(self, batch: ForwardBatch, num_rows: int) -> Decodes | None:
        """The batch's decodes, or all of its rows as decodes, if that is cheaper.

        The rows of a chunk can be decodes that share the chunk's context.  A small step then needs
        no launches for its prompts, and parallel splits read the context.  But in a step without
        decodes, rows stay prompts if splits then read fewer keys: each context once.
        """
        device, has_prompts = profile(), batch.num_decodes < batch.num_segments
        if has_prompts and batch.spans is None and num_rows <= device.rows_as_decodes:
            rows = as_decodes(batch)
            prefix = self._shared_prefix(rows, device.min_saved_for_prompts)
            own_keys = rows.seq_lens - (prefix.lens if prefix else 0)
            own = int(own_keys[batch.num_decodes :].sum())
            together = own + (int(prefix.lens.max()) if prefix else 0)
            if own <= device.max_own_keys and not self._reads_less(batch, together):
                return self._plan(rows, num_rows, prefix)
        if not batch.num_decodes:
            return None
        prefix = self._shared_prefix(batch, device.min_saved_tokens)
        return self._plan(batch, batch.num_decodes if has_prompts else num_rows, prefix)

    def _reads_less(self, batch: ForwardBatch, num_keys: int) -> bool:
        """Whether this step has no decodes, and in splits reads at most num_keys keys."""
        splits = self._reads_once and batch.seq_lens.max() >= profile().min_split_context
        return splits and not batch.num_decodes and int(batch.seq_lens.sum()) <= num_keys

    def _plan(self, batch: ForwardBatch, num_rows: int, prefix: SharedPrefixRows | None) -> Decodes:
        """The decodes of a batch, padded to num_rows."""
        seq_lens, shared = batch.seq_lens[: batch.num_decodes], None
        length = max(num_rows, MIN_ELEMENTS)
        if prefix is not None:
            shared = SharedPrefixArrays(
                1 << (int(prefix.lens.max()).bit_length() - 1),
                mx.array([prefix.leader], mx.int32),
                upload_padded(prefix.lens, length),
                self._plans(num_rows, seq_lens - prefix.lens),
            )
        width = max(power_of_two(-(-int(seq_lens.max()) // batch.block_size)), MIN_ELEMENTS)
        tables = tuple(
            upload_tables(table[: batch.num_decodes], num_rows, width)
            for table in batch.block_tables
        )
        plans = self._plans(num_rows, seq_lens)
        return Decodes(num_rows, tables, upload_padded(seq_lens, length), plans, shared)

    def _plans(self, count: int, num_keys: np.ndarray) -> Plans:
        longest = int(num_keys.max())
        found = {h: decode_plan(count, h, longest) for h in self._kv_heads}
        return found if self._splits else {h: p._replace(splits=1) for h, p in found.items()}


def decode_plan(batch: int, num_kv_heads: int, max_seq_len: int) -> DecodePlan:
    """Cut contexts into as many splits as fill the device, no more: merging costs a launch.

    Threadgroups are small if there are many, so that more run side by side, or if splits are short.
    """
    device = profile()
    splits, groups, fill = 1, batch * num_kv_heads, device.decode_fill
    if max_seq_len >= device.min_split_context:
        splits = num_splits(fill // groups, max_seq_len, device.min_split_keys)
    small = groups >= 2 * fill if splits == 1 else max_seq_len // splits <= device.few_keys
    return DecodePlan(splits, 4 if small else 8)


def reads_new_rows(batch: ForwardBatch) -> bool:
    """Whether a decode reads a row that another decode writes in this step: the last row of a block
    shared in the same step (`KVCacheManager.name_blocks`; only full blocks are shared)."""
    decodes = slice(batch.num_decodes)
    seq_lens = batch.seq_lens[decodes]
    whole = np.flatnonzero(seq_lens % batch.block_size == 0)
    if not len(whole):
        return False
    last = seq_lens[whole] // batch.block_size - 1
    longer = seq_lens[:, None] > seq_lens[whole]
    tables = batch.block_tables[:, decodes]
    return any((longer & (t[:, last] == t[whole, last])).any() for t in tables)


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
        """Whether the last result is still right for these rows."""
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
    """The prefix that saves the most reads of tokens; None if it saves fewer than min_saved.

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
