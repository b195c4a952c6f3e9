"""Attention of packed rows to latents in the paged store: decodes and prompts by one kernel."""

from functools import cache, lru_cache

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Kernel, Template, bits
from vllm_metal_lite.kernels.merge_partitions import lse_output, merge_partitions
from vllm_metal_lite.kernels.prefill import TILE_ROWS, VarlenMetadata
from vllm_metal_lite.kernels.store import STORE, TICKET, LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec

_INPUTS = ("q", "q_pe", *VarlenMetadata._fields, *STORE)
_LATENT_ATTENTION = Kernel("latent_attention", _INPUTS, ["out", "lse"])
# The most simdgroups of a threadgroup, except for large latents.
_SIMDGROUPS = 8


def decode_metadata(
    block_tables: mx.array, seq_lens: mx.array, num_rows: int, num_heads: int
) -> VarlenMetadata:
    """Decodes as segments of one row, for `latent_attention`."""
    cu_seqlens_q, tiles = _decode_tiles(num_rows, num_heads)
    return VarlenMetadata(block_tables, cu_seqlens_q, seq_lens, tiles)


@lru_cache(maxsize=256)
def _decode_tiles(num_rows: int, num_heads: int) -> tuple[mx.array, mx.array]:
    """cu_seqlens_q and tiles of decodes."""
    firsts = np.arange(0, num_heads, TILE_ROWS)
    tiles = np.stack([np.repeat(np.arange(num_rows), len(firsts)), np.tile(firsts, num_rows)], 1)
    padding = np.tile([-1, num_rows * num_heads], (max(0, MIN_ELEMENTS // 2 - len(tiles)), 1))
    cu_seqlens_q = mx.array(np.arange(max(num_rows + 1, MIN_ELEMENTS)).astype(np.int32))
    arrays = cu_seqlens_q, mx.array(np.concatenate([tiles, padding]).astype(np.int32))
    mx.eval(arrays)  # otherwise every compiled step would make its own
    return arrays


def latent_attention(
    q: mx.array,
    q_pe: mx.array,
    metadata: VarlenMetadata,
    store: LayerStore,
    *,
    scale: float,
    splits: int = 1,
) -> tuple[mx.array, mx.array]:
    """Causal attention of q (N, H, latent), q_pe (N, H, rope) -> (N, H, latent), the ticket.

    A slot's key is a latent, its value a rotary key.  A score is (q . latent + q_pe . rotary key)
    * scale, and its value is the latent.  metadata: its tiles are for H queries per KV head.
    splits: the parts of each context.
    The kernel reads q as (H, N, latent_dim), the layout of products per head; others are copied.
    Padding rows give zeros.  Sizes: those for which `attention_problem` finds none.
    """
    simdgroups = latent_simdgroups(q.shape[2], q.dtype.size)
    more = simdgroups > _SIMDGROUPS
    if more and not _fits(q.shape[1], store.spec, store.block_size, scale, min(splits, 2)):
        simdgroups = _SIMDGROUPS
    out, ticket = _launch(q, q_pe, metadata, store, scale, splits, simdgroups)
    return (merge_partitions(out, ticket, q.dtype) if splits > 1 else out), ticket


def _launch(
    q: mx.array,
    q_pe: mx.array,
    metadata: VarlenMetadata,
    store: LayerStore,
    scale: float,
    splits: int,
    simdgroups: int,
) -> list[mx.array]:
    (rows, heads, latent_dim), rope, partial = q.shape, q_pe.shape[2], splits > 1
    dtype = mx.float32 if partial else q.dtype
    template: Template = {"T": q.dtype, "OUT_T": dtype, "HEADS": heads, "LATENT_DIM": latent_dim}
    template |= {"ROPE": rope, **store.formats, "BLOCK_SIZE": store.block_size}
    template |= {"SCALE": bits(scale), "PARTIAL": partial, "SIMDGROUPS": simdgroups}
    lse = lse_output(rows, heads, splits) if partial else TICKET
    inputs = [q.swapaxes(0, 1), q_pe, *metadata, *store.arrays]
    out_shape = (rows, heads, splits, latent_dim) if partial else (rows, heads, latent_dim)
    grid, threads = (len(metadata.tiles), splits, 1), 32 * simdgroups
    return _LATENT_ATTENTION(inputs, template, grid, threads, [(out_shape, dtype), lse])


@cache
def _fits(heads: int, spec: LayerSpec, block_size: int, scale: float, splits: int) -> bool:
    """Whether this device runs the most simdgroups, tried with one row that sees no key.

    The device may allow fewer threads, because each needs many registers.
    """
    q, q_pe = (mx.zeros((1, heads, n), spec.dtype) for n in (spec.k_head_dim, spec.v_head_dim))
    formats, nothing = (spec.k_row, spec.v_row), mx.zeros((1, MIN_ELEMENTS), mx.int32)
    rows = (mx.zeros((MIN_ELEMENTS, 1, row.width), row.kept_dtype) for row in formats)
    store = LayerStore(*rows, new_ticket(), spec, block_size)
    arrays = q, q_pe, decode_metadata(nothing, nothing[0], 1, heads), store
    simdgroups = latent_simdgroups(spec.k_head_dim, spec.dtype.size)
    try:
        mx.eval(_launch(*arrays, scale, splits, simdgroups))
    except Exception:  # if fewer do not run either, their launch raises, too
        return False
    return True


def latent_simdgroups(latent_dim: int, itemsize: int) -> int:
    """The most simdgroups, up to 8, that share a latent's columns evenly, each a multiple of 8.

    Large latents in 16 bits may have 16; in float32, the scores of 16 would not fit.
    """
    large = latent_dim >= 512 and itemsize == 2
    most = profile().latent_simdgroups if large else _SIMDGROUPS
    return next(n for n in (16, 8, 4, 2, 1) if n <= most and latent_dim // 8 % n == 0)
