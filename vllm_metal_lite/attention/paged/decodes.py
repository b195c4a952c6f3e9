"""The rows of a step that are attended to as decodes, and the prefix that these rows share."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.attention.paged.shared_prefix import PrefixSearch, SharedPrefixRows
from vllm_metal_lite.attention.step_arrays import as_decodes, upload_padded, upload_tables
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.decode import DecodePlan
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, power_of_two
from vllm_metal_lite.kernels.merge_partitions import num_splits

# Number of KV heads -> the plan of such layers.
Plans = dict[int, DecodePlan]


class SharedPrefixArrays(NamedTuple):
    """length: the largest power of two within the prefix.  leader (1,), lens (num_rows,): see
    SharedPrefixRows.  plans: for the keys after the prefix."""

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

    kv_heads: the numbers of KV heads that layers have.  splits: contexts may be cut.
    sharing_groups: KV groups with layers that read a shared prefix once.  prompts_as_decodes:
    prompt rows of small steps may be decodes.
    """

    def __init__(
        self,
        kv_heads: Collection[int],
        *,
        splits: bool,
        sharing_groups: Sequence[int],
        prompts_as_decodes: bool,
    ) -> None:
        self._kv_heads, self._splits = sorted(kv_heads), splits
        self._prompts_as_decodes = prompts_as_decodes
        self._shared_prefix = PrefixSearch(sharing_groups)

    def __call__(self, batch: ForwardBatch, num_rows: int) -> Decodes | None:
        """The batch's decodes, or all of its rows as decodes, if that is cheaper.

        The rows of a chunk can be decodes that share the chunk's context.  A small step then needs
        no launches for its prompts, and parallel splits read the context.
        """
        device, prompts = profile(), batch.num_decodes < batch.num_segments
        if prompts and self._prompts_as_decodes and num_rows <= device.rows_as_decodes:
            rows = as_decodes(batch)
            prefix = self._shared_prefix(rows, device.min_saved_for_prompts)
            own = rows.seq_lens - (prefix.lens if prefix else 0)
            if own[batch.num_decodes :].sum() <= device.max_own_keys:
                return self._plan(rows, num_rows, prefix)
        if not batch.num_decodes:
            return None
        prefix = self._shared_prefix(batch, device.min_saved_tokens)
        return self._plan(batch, batch.num_decodes if prompts else num_rows, prefix)

    def _plan(self, batch: ForwardBatch, count: int, prefix: SharedPrefixRows | None) -> Decodes:
        decodes = slice(batch.num_decodes)
        seq_lens, shared = batch.seq_lens[decodes], None
        length, plans = max(count, MIN_ELEMENTS), self._plans(count, seq_lens)
        if prefix is not None:
            shared = SharedPrefixArrays(
                1 << (int(prefix.lens.max()).bit_length() - 1),
                mx.array([prefix.leader], mx.int32),
                upload_padded(prefix.lens, length),
                self._plans(count, seq_lens - prefix.lens),
            )
        width = max(power_of_two(-(-int(seq_lens.max()) // batch.block_size)), MIN_ELEMENTS)
        tables = tuple(upload_tables(t[decodes], count, width) for t in batch.block_tables)
        return Decodes(count, tables, upload_padded(seq_lens, length), plans, shared)

    def _plans(self, count: int, num_keys: np.ndarray) -> Plans:
        longest = int(num_keys.max())
        found = {h: decode_plan(count, h, longest) for h in self._kv_heads}
        return found if self._splits else {h: p._replace(splits=1) for h, p in found.items()}


def decode_plan(batch: int, num_kv_heads: int, max_seq_len: int) -> DecodePlan:
    """As many splits as fill the device, no more: merging costs a launch.

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
