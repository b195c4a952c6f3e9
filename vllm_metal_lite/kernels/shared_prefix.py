"""Attention of a step's decodes to a prefix that their sequences share, read once for all."""

from typing import NamedTuple

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kernels.ops import MAX_PREFILL_DIM, bits, head_size_problem, num_splits
from vllm_metal_lite.kernels.prefill import TILE_ROWS, keys_at_once

_SHARED_PREFIX = Kernel(
    "shared_prefix",
    ["q", "block_tables", "leader", "prefix_lens", "keys", "values", "token"],
    ["partial", "lse"],
)

# Threadgroups that keep the device busy: below it a prefix is cut into splits.  They hold more
# memory than those of `paged_decode`, and each waits for a tile of keys at a time.  Guesses.
_FILL = {"metal": 128, "cuda": 512, "cpu": 16}
# Fewest keys of a split.
_MIN_SPLIT = 128


class SharedPrefix(NamedTuple):
    """What `paged_decode` starts from.

    partial (B, H, splits, v_head_dim) and lse (B, H, splits) float32: attention to the prefix.
    lens: (B,) int32, the prefix's length for a row that has it, 0 for any other.
    """

    partial: mx.array
    lse: mx.array
    lens: mx.array


def prefix_splits(num_rows: int, num_heads: int, num_kv_heads: int, prefix_len: int) -> int:
    """Parts that a prefix is cut into: enough threadgroups to fill the device."""
    tiles = -(-num_rows * (num_heads // num_kv_heads) // TILE_ROWS)
    fill = _FILL[backend.name()] // (num_kv_heads * tiles)
    return num_splits(fill, prefix_len, _MIN_SPLIT)


def shared_prefix(
    q: mx.array,
    block_tables: mx.array,
    leader: mx.array,
    prefix_lens: mx.array,
    keys: mx.array,
    values: mx.array,
    token: mx.array,
    *,
    block_size: int,
    scale: float,
    splits: int,
    softcap: float | None = None,
) -> SharedPrefix:
    """Attention of q (B, H, k_head_dim) to the first prefix_lens[leader] keys of row `leader`.

    block_tables: (B, max_blocks).  leader: (1,) int32.  prefix_lens: (B,) int32.  Head dims:
    multiples of 8 up to 256.  The next token is the result's lse.
    """
    rows, heads, k_dim = q.shape
    kv_heads, v_dim = keys.shape[1], values.shape[2]
    if problem := head_size_problem((k_dim, v_dim), MAX_PREFILL_DIM):
        raise ValueError(problem)
    group, simdgroups = heads // kv_heads, TILE_ROWS // 8
    template = {
        "T": q.dtype, "KV_HEADS": kv_heads, "GROUP": group, "K_DIM": k_dim, "V_DIM": v_dim,
        "BLOCK_SIZE": block_size, "SCALE": bits(scale), "SOFTCAP": bits(softcap or 0.0),
        "KEYS": keys_at_once(k_dim, v_dim, q.dtype.size), "SIMDGROUPS": simdgroups,
    }  # fmt: skip
    partial, lse = _SHARED_PREFIX(
        [q, block_tables, leader, prefix_lens, keys, values, token],
        template, (kv_heads, -(-rows * group // TILE_ROWS), splits), 32 * simdgroups,
        [(rows, heads, splits, v_dim), (rows, heads, splits)], [mx.float32, mx.float32],
    )  # fmt: skip
    return SharedPrefix(partial, lse, prefix_lens)
