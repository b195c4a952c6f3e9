"""Attention of packed prefills over the paged store."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Kernel, Template, check_array
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
    cu_seqlens_q: mx.array
    seq_lens: mx.array
    tiles: mx.array


_INPUTS = ("q", *VarlenMetadata._fields, "spans", "sinks", *STORE)
_VARLEN_PREFILL = Kernel("varlen_prefill", _INPUTS, ["out", "next_ticket"])


def varlen_prefill(
    q: mx.array,
    metadata: VarlenMetadata,
    store: LayerStore,
    scores: Scores,
    spans: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Causal attention of packed q (N, H, k_head_dim) -> (N, H, v_head_dim), the ticket.

    spans: PictureRows.spans, of at least MIN_ELEMENTS rows; None: rows see only keys before them.
    Padding rows give zeros.  Sizes: those for which `attention_problem` finds none.
    """
    rows, heads, _ = q.shape
    check_array("spans", spans, (max(rows, MIN_ELEMENTS), 2), mx.int32)
    spec = store.spec
    kv_heads, k_dim, v_dim = spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim
    partners = partners_of(k_dim, v_dim, q.dtype)
    simdgroups = TILE_ROWS // 8 * partners
    template: Template = {"T": q.dtype, "KV_HEADS": kv_heads, "GROUP": heads // kv_heads}
    template |= store.template | {"BLOCK_SIZE": store.block_size, **scores.template}
    template |= {"KEYS": keys_at_once(k_dim, v_dim, q.dtype.size), "SIMDGROUPS": simdgroups}
    template |= {"PARTNERS": partners, "SPANS": spans is not None}
    inputs = [q, *metadata, spans, scores.sinks_as(q.dtype), *store.arrays]
    grid, threads = (kv_heads, len(metadata.tiles), 1), 32 * simdgroups
    outputs = [((rows, heads, v_dim), q.dtype), TICKET]
    out, ticket = _VARLEN_PREFILL(inputs, template, grid, threads, outputs)
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
