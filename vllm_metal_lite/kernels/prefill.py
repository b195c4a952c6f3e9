"""Attention of packed prefills over the paged store."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Kernel, Output, Template, check_array
from vllm_metal_lite.kernels.merge_partitions import lse_output, merge_partitions
from vllm_metal_lite.kernels.rope_write import NewRows, query_inputs
from vllm_metal_lite.kernels.store import STORE, TICKET, LayerStore

# (row, head) pairs per threadgroup, 8 per simdgroup, as in MLX's attention.  More would save
# fetches, but registers limit the simdgroups of a core, whatever their tile.
TILE_ROWS = 32
# Bytes of threadgroup memory for a tile of K and one of V.  Metal allows 32 KB; with less, one
# threadgroup of a core can compute while another fetches.
_TILE_BYTES = 18 << 10


class VarlenMetadata(NamedTuple):
    """Kernel inputs: where the keys of packed rows are, in int32.

    block_tables: (S, max_blocks).  cu_seqlens_q: (S+1,).  seq_lens: (S,) keys of each segment,
    including this step's rows.  tiles: (T, 2), each a segment and the first of TILE_ROWS
    (row, head) pairs in it; segment -1: padding.
    """

    block_tables: mx.array
    cu_seqlens_q: mx.array | None
    seq_lens: mx.array
    tiles: mx.array


_INPUTS = ("q", "q_weight", "freqs", "positions", *VarlenMetadata._fields, "spans", "sinks", *STORE)
_VARLEN_PREFILL = Kernel("varlen_prefill", _INPUTS, ["out", "lse"])


def varlen_prefill(
    q: mx.array,
    metadata: VarlenMetadata,
    store: LayerStore,
    scores: Scores,
    *,
    splits: int = 1,
    spans: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Causal attention of packed q (N, H, k_head_dim) -> (N, H, v_head_dim), the ticket.

    spans: PictureRows.spans, of at least MIN_ELEMENTS rows; None: rows see only keys before them.
    Padding rows give zeros.  Sizes: those for which `attention_problem` finds none.
    splits: the number of parts of each context.
    """
    out, ticket = attend_tiles(q, metadata, store, scores, len(metadata.tiles), splits, spans=spans)
    if splits > 1:
        out = merge_partitions(out, ticket, q.dtype)
    return out, ticket


def attend_tiles(
    q: mx.array | NewRows,
    metadata: VarlenMetadata,
    store: LayerStore,
    scores: Scores,
    num_tiles: int,
    splits: int,
    *,
    prefix: bool = False,
    spans: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """One launch.  With one split it returns what `varlen_prefill` returns.  With more splits, or
    if prefix, it returns (N, H, splits, v_head_dim) and lse (N, H, splits), both float32, for
    `merge_partitions`.

    prefix: all rows attend to a prefix that they share (`shared_prefix`); then spans is None.
    """
    spec = store.spec
    kv_heads, k_dim, v_dim, dtype = spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim, spec.dtype
    rows, heads, (queries, _, _, weight, _, *angles), of_rows = query_inputs(q, spec)
    check_array("spans", spans, (max(rows, MIN_ELEMENTS), 2), mx.int32)
    partial = prefix or splits > 1
    partners = partners_of(k_dim, v_dim, dtype, held=64 if partial else 0)
    simdgroups = TILE_ROWS // 8 * partners
    out_dtype = mx.float32 if partial else dtype
    template: Template = {"T": dtype, "OUT_T": out_dtype, "KV_HEADS": kv_heads}
    template |= {"GROUP": heads // kv_heads, "PREFIX": prefix, "SPLIT": partial and not prefix}
    # This kernel reads no new K and V, so it is compiled once, without their types.
    template |= {name: value for name, value in of_rows.items() if name[:2] not in ("K_", "V_")}
    template |= store.template | {"BLOCK_SIZE": store.block_size, **scores.template}
    template |= {"KEYS": keys_at_once(k_dim, v_dim, dtype.size), "SIMDGROUPS": simdgroups}
    template |= {"PARTNERS": partners, "SPANS": spans is not None}
    inputs = [queries, weight, *angles, *metadata, spans, scores.sinks_as(dtype), *store.arrays]
    sums = (rows, heads, splits) if partial else (rows, heads)
    lse: Output = TICKET
    if partial:
        lse = (sums, mx.float32) if prefix else lse_output(*sums)
    grid, outputs = (kv_heads, num_tiles, splits), [((*sums, v_dim), out_dtype), lse]
    out, ticket = _VARLEN_PREFILL(inputs, template, grid, 32 * simdgroups, outputs)
    return out, ticket


def keys_at_once(k_dim: int, v_dim: int, itemsize: int) -> int:
    """Keys per tile: as many as memory holds, for the fewest barriers and maxima."""
    padded = sum(8 * (dim // 8 | 1) for dim in (k_dim, v_dim))
    return next(keys for keys in (32, 16, 8) if keys * padded * itemsize <= _TILE_BYTES)


def partners_of(k_dim: int, v_dim: int, dtype: mx.Dtype, held: int = 0) -> int:
    """Simdgroups that share 8 rows: two, where one would have too few registers.

    held: registers of 16 bits that a lane needs for the next tile.  Mesa's compiler for Apple
    GPUs keeps a bfloat16 of a query as a float.
    """
    registers = k_dim // 4 * (1 if dtype == mx.float16 else 2) + v_dim // 2
    return 2 if registers + held > profile().prefill_registers and v_dim % 16 == 0 else 1
