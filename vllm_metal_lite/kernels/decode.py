"""Attention of decodes, one row per sequence, to their keys in the store."""

import math
from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kernels.launch import Kernel, Template
from vllm_metal_lite.kernels.merge_partitions import lse_output, merge_partitions
from vllm_metal_lite.kernels.rope_write import ROWS, NewRows, query_inputs
from vllm_metal_lite.kernels.shared_prefix import SharedPrefixResult
from vllm_metal_lite.kernels.store import STORE, LayerStore
from vllm_metal_lite.kv.row_format import RowFormat

_CONTEXT = ("block_tables", "seq_lens", "sinks", "prefix", "prefix_lse", "prefix_lens")
_PAGED_DECODE = Kernel("paged_decode", [*ROWS, *_CONTEXT, *STORE], ["out", "lse"])


class DecodePlan(NamedTuple):
    """splits: the number of splits of each context.  simdgroups: the SIMD groups of a threadgroup,
    which computes one split."""

    splits: int
    simdgroups: int


def paged_decode(
    q: mx.array | NewRows,
    block_tables: mx.array,
    seq_lens: mx.array,
    store: LayerStore,
    scores: Scores,
    *,
    plan: DecodePlan,
    prefix: SharedPrefixResult | None = None,
) -> tuple[mx.array, mx.array]:
    """Attention of q (B, H, k_head_dim) to seq_lens (B,) keys -> (B, H, v_head_dim), the ticket.

    q may be NewRows (B): then the launch also writes k and v to the last slot of each sequence.  No
    sequence may see another's new slot.
    block_tables: (B, max_blocks).  seq_lens may be longer than B.  A seq_len of 0 gives a row of
    zeros.  plan: as `attention/paged/decodes.py` makes it.
    prefix: attention of the same q to a shared prefix, which the kernel skips; not with a window.
    """
    kv_heads, k_row, v_row = store.spec.num_kv_heads, store.spec.k_row, store.spec.v_row
    k_dim, v_dim, dtype = k_row.dim, v_row.dim, k_row.dtype
    batch, heads, arrays, of_rows = query_inputs(q, store.spec)
    group = heads // kv_heads
    aligned = (_load_words(row) for row in (k_row, v_row))
    lanes, k_width, v_width = _lanes(k_row.value_words, v_row.value_words, *aligned)
    per_lane = max(k_dim, v_dim) // lanes
    device = profile()
    tiles = -(-group // max(1, device.decode_sums // per_lane))
    at_once = -(-group // tiles)
    many = (per_lane <= 12 or k_row.bits) and at_once * per_lane <= device.decode_sums_of_four
    splits, simdgroups = plan.splits, plan.simdgroups
    partial = splits > 1
    out_dtype = mx.float32 if partial else dtype
    template: Template = {"T": dtype, "OUT_T": out_dtype, "KV_HEADS": kv_heads, "GROUP": group}
    template |= {"HEADS": at_once, **of_rows}
    template |= {"PREFIX": prefix is not None, **store.template}
    template |= {"BLOCK_SIZE": store.block_size, **scores.template}
    template |= {"LANES": lanes, "KW": k_width, "VW": v_width}
    template |= {"UNROLL": 4 if many else 2, "SIMDGROUPS": simdgroups}
    shared = prefix or (None, None, seq_lens)
    inputs = [*arrays, block_tables, seq_lens, scores.sinks_as(dtype), *shared, *store.arrays]
    grid, threads = (kv_heads * tiles, batch, splits), 32 * simdgroups
    out_shape = (batch, heads, splits, v_dim) if partial else (batch, heads, v_dim)
    outputs = [(out_shape, out_dtype), lse_output(batch, heads, splits)]
    out, ticket = _PAGED_DECODE(inputs, template, grid, threads, outputs)
    if partial:
        out = merge_partitions(out, ticket, dtype)
    return out, ticket


def _load_words(row: RowFormat) -> int:
    """The most words that one load may read: it is aligned in every row, and stays within one
    quantisation group."""
    if row.bits is None:
        return 4
    return math.gcd(row.width, row.group_size * row.bits // 32, 4)


def _lanes(
    k_words: int, v_words: int, k_widest: int = 4, v_widest: int = 4
) -> tuple[int, int, int]:
    """The number of lanes that share a key, and the words per load of K and of V.

    Wide loads are faster, but give a lane a longer part of a row.
    """
    options = []
    for lanes in (32, 16, 8, 4, 2, 1):
        if k_words % lanes or v_words % lanes:
            continue
        k_width = math.gcd(k_words // lanes, k_widest)
        v_width = math.gcd(v_words // lanes, v_widest)
        part = max(k_words, v_words) // lanes
        options.append((part + 8 // min(k_width, v_width), lanes, k_width, v_width))
    _, lanes, k_width, v_width = min(options)
    return lanes, k_width, v_width
