"""The work of each kernel, and the same work by its fallback, ready to be timed.

Both run as serving runs them: `KernelAttention` with the kernel and without it, or the MLX
operations that a fused kernel replaces.  The loads are large enough that the device's work, not the
host's, is timed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vllm_metal_lite.attention.pending_heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import TimedStore, spec_of
from vllm_metal_lite.checks.check import AttentionCheck, Check, NormShape
from vllm_metal_lite.checks.new_rows import launch_and_rows, new_rows
from vllm_metal_lite.checks.values import EPS
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.cache_ops import kv_write
from vllm_metal_lite.kernels.columns import Columns
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_write import NewLatents
from vllm_metal_lite.kernels.norm_rope import Rope
from vllm_metal_lite.kernels.rope_write import NewRows
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.specs import AttentionShape, GatedNormShape

# Decodes and their context; a long context, in splits; a prefix that the decodes share.
_DECODES, _CONTEXT, _LONG, _PREFIX = 16, 512, 4096, 2048
# Prompts: (sequences, context, rows of each): four whole ones, and a chunk.
_PROMPTS = ((4, 512, 512), (1, 4096, 1024))
# Rows of launches without attention.
_ROWS = 512

Work = Callable[[], object]
# The work with the kernel, and without it.
Pair = tuple[Work, Work]
# Rotated queries, keys and values.
Unfused = tuple[mx.array, mx.array, mx.array]


def _decodes(check: AttentionCheck, count: int, context: int, prefix: int = 0) -> list[Pair]:
    """Decodes with the kernel, and without it."""
    load = TimedStore(check.shape, count, context, prefix=prefix, block_size=check.block_size)
    q = load.queries()
    return [(partial(load.attention(), q), partial(load.attention(without=check.kernel), q))]


def decode(check: AttentionCheck) -> list[Pair]:
    return _decodes(check, _DECODES, _CONTEXT)


def merge(check: AttentionCheck) -> list[Pair]:
    return _decodes(check, 1, _LONG)


def prefix(check: AttentionCheck) -> list[Pair]:
    return _decodes(check, _DECODES, _PREFIX + 128, _PREFIX)


def prompts(check: AttentionCheck) -> list[Pair]:
    """Prompts read in place, and gathered."""
    pairs: list[Pair] = []
    for sizes in _PROMPTS:
        load = TimedStore(check.shape, *sizes, block_size=check.block_size)
        q = load.queries()
        pairs.append((partial(load.attention("varlen"), q), partial(load.attention("gather"), q)))
    return pairs


def reorder(check: AttentionCheck) -> list[Pair]:
    shape = check.shape
    q = mx.random.normal((_ROWS, shape.num_heads, shape.k_head_dim)).astype(shape.dtype)
    index = mx.array(np.random.default_rng(0).permutation(_ROWS).astype(np.int32))
    mx.eval(q, index)
    return [(lambda: gather_rows(q, index), lambda: q[index])]


def add_norm(check: Check[NormShape]) -> list[Pair]:
    size, dtype = check.shape
    x, weight = mx.random.normal((_ROWS, size)).astype(dtype), mx.ones(size, dtype)
    mx.eval(x, weight)

    def unfused() -> object:
        added = x + x
        return added, mx.fast.rms_norm(added, weight, EPS)

    return [(lambda: add_rms_norm(x, x, weight, EPS), unfused)]


def gated_norm(check: Check[GatedNormShape]) -> list[Pair]:
    """Timed for the norm before the gate; the other order has as many launches."""
    shape = check.shape
    x = mx.random.normal((_ROWS, shape.groups, shape.dim)).astype(shape.dtype)
    weight, z = mx.ones(shape.dim, shape.dtype), Columns(x.reshape(_ROWS, -1), 0)
    mx.eval(x, weight, z.array)

    def unfused() -> mx.array:
        return mx.fast.rms_norm(x, weight, EPS) * (x * mx.sigmoid(x))

    fused = partial(gated_rms_norm, x, z, weight, EPS, dim=shape.dim)
    return [(fused, mx.compile(unfused))]


def _rotate(x: mx.array, rope: Rope, where: mx.array) -> mx.array:
    """The heads x rotated to the positions `where`, by MLX."""
    if rope.factor != 1:
        x = x.at[..., : rope.dims].multiply(rope.factor)
    how: dict[str, Any] = {"traditional": rope.traditional, "base": rope.base, "freqs": rope.freqs}
    return mx.fast.rope(x, rope.dims, **how, scale=rope.scale, offset=where)


def write(check: AttentionCheck) -> list[Pair]:
    """One launch for the new rows of prompts, and one each for norm, rotation and kv_write."""
    positions, spec = np.arange(_ROWS), spec_of(check.shape)
    launch, new, _ = launch_and_rows(check, positions)
    store = PagedStore([spec], -(-_ROWS // 16), 16)
    layer = LayerStore(store.keys[0], store.values[0], new_ticket(), spec)
    where = mx.array(positions.astype(np.int32))
    mx.eval([columns.array for columns in new if isinstance(columns, Columns)], where, layer.ticket)

    def unfused() -> object:
        if isinstance(new, NewLatents):
            q, k, v = _unfused_latents(new, check.shape, where)
        else:
            q, k, v = _unfused_rows(new, check.shape, where)
        return q, kv_write(k, v, where, layer)

    return [(partial(launch, new, where, where, layer), unfused)]


def _unfused_rows(new: NewRows, shape: AttentionShape, where: mx.array) -> Unfused:
    rope = new.rope
    assert rope is not None
    parts = mx.split(new.q.array, (new.k.start, new.v.start), axis=1)
    dims = shape.k_head_dim, shape.k_head_dim, shape.v_head_dim
    q, k, v = (x.reshape(_ROWS, -1, 1, dim) for x, dim in zip(parts, dims, strict=True))
    q, k = (
        _rotate(mx.fast.rms_norm(x, norm.weight, norm.eps) if norm else x, rope, where)
        for x, norm in ((q, new.q_norm), (k, new.k_norm))
    )
    return q, k.squeeze(2), v.squeeze(2)


def _unfused_latents(new: NewLatents, shape: AttentionShape, where: mx.array) -> Unfused:
    q = new.q.array.reshape(_ROWS, shape.num_heads, 1, -1)[..., -shape.v_head_dim :]
    latents, k_pe = mx.split(new.latent.array, [shape.k_head_dim], axis=1)
    latents = mx.fast.rms_norm(latents, new.norm.weight, new.norm.eps)[:, None]
    rotary = _rotate(k_pe[:, None, None], new.rope, where).squeeze(2)
    return _rotate(q, new.rope, where), latents, rotary


def fused_decode(check: AttentionCheck) -> list[Pair]:
    """One launch for decodes, and `rope_write` before `paged_decode`."""
    assert check.rope is not None
    shape, dim = check.shape, check.shape.k_head_dim
    load = TimedStore(shape, _DECODES, _CONTEXT, block_size=check.block_size)
    new, _ = new_rows(shape, load.batch.positions, check.rope)
    mx.eval(new.arrays)
    heads = (
        Heads(new.q, shape.num_heads, dim, new.q_norm, new.rope),
        Heads(new.k, shape.num_kv_heads, dim, new.k_norm, new.rope),
        Heads(new.v, shape.num_kv_heads, shape.v_head_dim),
    )
    fused, unfused = load.attention(), load.attention(without=check.kernel)
    return [(partial(fused, heads), partial(unfused, heads))]
