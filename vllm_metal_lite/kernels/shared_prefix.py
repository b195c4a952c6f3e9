"""Attention of a step's decodes to a shared prefix, read once for all sequences."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kernels.merge_partitions import num_splits
from vllm_metal_lite.kernels.prefill import TILE_ROWS, VarlenMetadata, attend_tiles
from vllm_metal_lite.kernels.rope_write import NewRows, query_inputs
from vllm_metal_lite.kernels.store import LayerStore


class SharedPrefixResult(NamedTuple):
    """Attention to a shared prefix, from which `paged_decode` continues.

    partial (B, H, splits, v_head_dim) and lse (B, H, splits) float32: attention to the prefix.
    lens: (B,) int32, the prefix's length for rows that share the prefix, 0 for others.
    """

    partial: mx.array
    lse: mx.array
    lens: mx.array


def prefix_splits(num_rows: int, num_heads: int, num_kv_heads: int, prefix_len: int) -> int:
    """Splits of a prefix: enough threadgroups to fill the device."""
    tiles = -(-num_rows * (num_heads // num_kv_heads) // TILE_ROWS)
    device = profile()
    fill = device.prefix_fill // (num_kv_heads * tiles)
    return num_splits(fill, prefix_len, device.min_prefix_split_keys)


def shared_prefix(
    q: mx.array | NewRows,
    block_tables: mx.array,
    leader: mx.array,
    prefix_lens: mx.array,
    store: LayerStore,
    scores: Scores,
    *,
    splits: int,
) -> SharedPrefixResult:
    """Attention of q (B, H, k_head_dim) to the first prefix_lens[leader] keys of row `leader`.

    q may be NewRows (B): its queries are first normalised and rotated.
    block_tables: (B, max_blocks).  leader (1,), prefix_lens (B,): int32.
    scores must have no window; its sinks are ignored here, because `paged_decode` counts them.
    `sees_prefixes` says which sizes are accepted.  The result's lse is the next ticket.
    """
    rows, heads, *_ = query_inputs(q, store.spec)
    tiles = -(-rows * (heads // store.spec.num_kv_heads) // TILE_ROWS)
    metadata = VarlenMetadata(block_tables, None, prefix_lens, leader)
    how = scores._replace(sinks=None), tiles, splits
    partial, lse = attend_tiles(q, metadata, store, *how, prefix=True)
    return SharedPrefixResult(partial, lse, prefix_lens)
