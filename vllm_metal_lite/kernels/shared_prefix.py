"""Attention of a step's decodes to a shared prefix, read once for all sequences."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kernels.launch import Kernel, Template, bits
from vllm_metal_lite.kernels.merge_partitions import num_splits
from vllm_metal_lite.kernels.prefill import TILE_ROWS, keys_at_once, partners_of
from vllm_metal_lite.kernels.rope_write import NewRows, query_inputs
from vllm_metal_lite.kernels.store import STORE, LayerStore

_ROWS = ("q", "q_weight", "freqs", "positions", "block_tables", "leader", "prefix_lens")
_SHARED_PREFIX = Kernel("shared_prefix", [*_ROWS, *STORE], ["partial", "lse"])


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
    spec = store.spec
    kv_heads, k_dim, v_dim, dtype = spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim, spec.dtype
    rows, heads, (queries, _, _, weight, _, *angles), of_rows = query_inputs(q, spec)
    # Without the types of new K and V, which this kernel does not read: one compilation serves all.
    of_queries = {name: value for name, value in of_rows.items() if name[:2] not in ("K_", "V_")}
    group, partners = heads // kv_heads, partners_of(k_dim, v_dim, dtype, held=64)
    simdgroups = TILE_ROWS // 8 * partners
    template: Template = {"T": dtype, "KV_HEADS": kv_heads, "GROUP": group, **of_queries}
    template |= store.template | {"BLOCK_SIZE": store.block_size, "SCALE": bits(scores.scale)}
    template["SOFTCAP"] = bits(scores.softcap or 0.0)
    template |= {"KEYS": keys_at_once(k_dim, v_dim, dtype.size), "SIMDGROUPS": simdgroups}
    template["PARTNERS"] = partners
    inputs = [queries, weight, *angles, block_tables, leader, prefix_lens, *store.arrays]
    grid = kv_heads, -(-rows * group // TILE_ROWS), splits
    shapes = (rows, heads, splits, v_dim), (rows, heads, splits)
    outputs = [(shape, mx.float32) for shape in shapes]
    partial, lse = _SHARED_PREFIX(inputs, template, grid, 32 * simdgroups, outputs)
    return SharedPrefixResult(partial, lse, prefix_lens)
