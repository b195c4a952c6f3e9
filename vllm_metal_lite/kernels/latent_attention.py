"""Attention of packed rows to latents in the paged store: decodes and prompts by one kernel."""

from functools import cache, lru_cache

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Kernel, Template, bits, is_of_device
from vllm_metal_lite.kernels.merge_partitions import lse_output, merge_partitions
from vllm_metal_lite.kernels.prefill import TILE_ROWS, VarlenMetadata
from vllm_metal_lite.kernels.store import STORE, TICKET, LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec, PagedStore

_INPUTS = ("q", "q_pe", *VarlenMetadata._fields, *STORE)
_LATENT_ATTENTION = Kernel("latent_attention", _INPUTS, ["out", "lse"])


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
    simdgroups: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Causal attention of q (N, H, latent), q_pe (N, H, rope) -> (N, H, latent), the ticket.

    A slot's key is a latent, its value a rotary key.  A score is (q . latent + q_pe . rotary key)
    * scale, and its value is the latent.  metadata: its tiles are for H queries per KV head.
    splits: the parts of each context.  simdgroups: by default as many as this device runs.
    The kernel reads q as (H, N, latent_dim), the layout of products per head; others are copied.
    Padding rows give zeros.  Sizes: those for which `attention_problem` finds none.
    """
    rows, heads, latent_dim = q.shape
    rope = q_pe.shape[2]
    partial = splits > 1
    if simdgroups is None:
        how = min(splits, 2), heads, scale, store.spec, store.block_size
        simdgroups = latent_simdgroups(latent_dim, q.dtype.size)
        simdgroups = simdgroups if simdgroups <= 8 or _runs(simdgroups, *how) else 8
    dtype = mx.float32 if partial else q.dtype
    template: Template = {"T": q.dtype, "OUT_T": dtype, "HEADS": heads, "LATENT_DIM": latent_dim}
    template |= {"ROPE": rope, **store.formats, "BLOCK_SIZE": store.block_size}
    template |= {"SCALE": bits(scale), "PARTIAL": partial, "SIMDGROUPS": simdgroups}
    lse = lse_output(rows, heads, splits) if partial else TICKET
    inputs = [q.swapaxes(0, 1), q_pe, *metadata, *store.arrays]
    out_shape = (rows, heads, splits, latent_dim) if partial else (rows, heads, latent_dim)
    grid, threads = (len(metadata.tiles), splits, 1), 32 * simdgroups
    out, ticket = _LATENT_ATTENTION(inputs, template, grid, threads, [(out_shape, dtype), lse])
    if partial:
        out = merge_partitions(out, ticket, q.dtype)
    return out, ticket


@cache
def _runs(most: int, splits: int, heads: int, scale: float, spec: LayerSpec, size: int) -> bool:
    """Whether this device runs `most` simdgroups, tried with one row that sees no key: it may allow
    fewer threads, because each needs many registers.  size: tokens per block."""
    q, q_pe = (mx.zeros((1, heads, n), spec.dtype) for n in (spec.k_head_dim, spec.v_head_dim))
    kept, none = PagedStore([spec], 0, size), mx.zeros((1, MIN_ELEMENTS), mx.int32)
    store = LayerStore(kept.keys[0], kept.values[0], new_ticket(), spec, size)
    arrays = q, q_pe, decode_metadata(none, none[0], 1, heads), store
    try:
        mx.eval(latent_attention(*arrays, scale=scale, splits=splits, simdgroups=most))
    except Exception as e:  # if fewer do not run either, their launch raises, too
        if not is_of_device(e):
            raise
        return False
    return True


def latent_simdgroups(latent_dim: int, itemsize: int) -> int:
    """The most simdgroups, up to 8, that share a latent's columns evenly, each a multiple of 8.

    Large latents in 16 bits may have 16; in float32, the scores of 16 would not fit.
    """
    most = profile().latent_simdgroups if latent_dim >= 512 and itemsize == 2 else 8
    return next(n for n in (16, 8, 4, 2, 1) if n <= most and latent_dim // 8 % n == 0)
