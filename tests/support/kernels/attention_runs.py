"""A small launch of every kernel of attention and of the store, which uses all of its parts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.support.kernels.arrays import seeded
from tests.support.kernels.device import change_device
from tests.support.kernels.row import LATENT, PLAIN, QUANTISED, KernelTest, ServingCase
from vllm_metal_lite.attention.paged.attention import plan_tiles
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import cache_ops, decode, latent_attention
from vllm_metal_lite.kernels import merge_partitions as merging
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope, Scores
from vllm_metal_lite.kernels.decode import DecodePlan
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.prefill import VarlenMetadata, varlen_prefill
from vllm_metal_lite.kernels.rope_write import NewRows, rope_write
from vllm_metal_lite.kernels.shared_prefix import SharedPrefixResult, shared_prefix
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec

FACTOR = 1.3466  # the factor of a rotation
KV_HEADS, HEADS, GROUP, DIM, BLOCK_SIZE, SLOTS = 2, 18, 9, 72, 8, 96
SCORES = Scores(0.2)
# The slots of written rows.  94 and 95 are the last two, so a write beyond a row leaves the store.
NEW_SLOTS, POSITIONS = (mx.array(n, mx.int32) for n in ([7, 94, -1, 95, 40], [0, 3, 4, 9, 50]))


def spec_of(dtype, bits=None, dim=DIM):
    """A layer's format.  In 4 bits, a row has three groups of 24 values."""
    return LayerSpec(KV_HEADS, dim, dim, dtype, bits=bits)


def store(spec, slots=SLOTS):
    rows = zip((spec.k_row, spec.v_row), (1, 2), strict=True)
    shape = slots, spec.num_kv_heads
    kept = (row.pack(seeded(*shape, row.dim, seed=seed, dtype=spec.dtype)) for row, seed in rows)
    return LayerStore(*kept, new_ticket(), spec, BLOCK_SIZE)


def new_rows(count, heads, dtype, dim=DIM, seed=13, factor=1.0):
    """New rows: q, k and v side by side, not yet normalised and rotated."""
    rows = seeded(count, (heads + 2 * KV_HEADS) * dim, seed=seed, dtype=dtype)
    columns = [Columns(rows, n * dim) for n in (0, heads, heads + KV_HEADS)]
    norm = RMSNorm(seeded(dim, seed=10, dtype=dtype), 1e-5)
    return NewRows(*columns, heads, Rope(40, False, 1e4, 1.0, None, factor), norm, norm, POSITIONS)


def kv_write(dtype, bits=None):
    spec = spec_of(dtype, bits)
    rows, written = [seeded(5, KV_HEADS, DIM, seed=n, dtype=dtype) for n in (3, 4)], store(spec)
    return [*written[:2], cache_ops.kv_write(*rows, NEW_SLOTS, written)]


def wide_kv_write(dtype):
    """Rows have 13 groups of 40 values, more than 32 lanes take at once.  SIMD groups outnumber
    heads."""
    spec = LayerSpec(5, 520, 520, dtype, bits=8)
    rows, written = [seeded(3, 5, 520, seed=n, dtype=dtype) for n in (3, 4)], store(spec, 8)
    slots = mx.array([7, -1, 2], mx.int32)
    return [*written[:2], cache_ops.kv_write(*rows, slots, written)]


def kv_gather(dtype, bits=None):
    slots, spec = mx.array([95, 3, 4, 0, 94, 95], mx.int32), spec_of(dtype, bits)
    return list(cache_ops.kv_gather(slots, store(spec)))


def decoded(q, kept, plan, prefix=None):
    """Sequences of 21, 0 and 9 keys, the first two blocks of the first at the end of the store."""
    tables = mx.array([[11, 10, 2], [0, 0, 0], [4, 5, 0]], mx.int32)
    arrays = q, tables, mx.array([21, 0, 9], mx.int32), kept
    return decode.paged_decode(*arrays, SCORES, plan=DecodePlan(*plan), prefix=prefix)[0]


def paged_decode(dtype, bits=None, plan=(1, 2), prefix=None):
    spec, q = spec_of(dtype, bits), seeded(3, HEADS, DIM, seed=5, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        change_device(patch, decode_sums=64)  # two tiles in float32; the second has one head less
        return [decoded(q, store(spec), plan, prefix)]


def fused_decode(dtype, bits=None, factor=1.0):
    """Two splits, and several tiles a head.  The kernel writes the newest rows to the store."""
    written, rows = store(spec_of(dtype, bits)), new_rows(3, HEADS, dtype, factor=factor)
    return [*written[:2], decoded(rows, written, (2, 2))]


def shared_prefix_rows(dtype, q=None, dim=DIM, bits=None):
    """The prefix is the second row's first 45 keys, in two splits.  The last split and the tile of
    27 pairs are not full."""
    blocks, spec = [10, 2, 11, 5, 3, 0], spec_of(dtype, bits, dim)
    tables = mx.array([[4] * 6, blocks, blocks], mx.int32)
    lens = [mx.array(n, mx.int32) for n in ([1], [0, 45, 45])]
    q = seeded(3, HEADS, dim, seed=5, dtype=dtype) if q is None else q
    arrays = q, tables, *lens, store(spec)
    return list(shared_prefix(*arrays, SCORES, splits=2)[:2])


def shared_prefix_of_new_rows(dtype, factor=1.0):
    """The same, of queries that are still to be normalised and turned, and so large that a
    simdgroup does it in turns."""
    return shared_prefix_rows(dtype, new_rows(3, HEADS, dtype, 136, factor=factor), 136)


def decode_behind_a_prefix(dtype, splits=3, plan=(1, 2)):
    """The sequences of `decoded`; the first shares a prefix of 8 keys."""
    parts = (seeded(3, HEADS, *dims, seed=13) for dims in ((splits, DIM), (splits,)))
    prefix = SharedPrefixResult(*parts, mx.array([8, 0, 0], mx.int32))
    return paged_decode(dtype, plan=plan, prefix=prefix)


def merge_partitions(dtype):
    """Merge 40 splits of two rows."""
    parts = seeded(1, 2, 40, DIM, seed=7), seeded(1, 2, 40, seed=8)
    return [merging.merge_partitions(*parts, dtype)]


def varlen_prefill_rows(dtype, bits=None, dims=(DIM, DIM), splits=1, scores=SCORES, spans=None):
    """Prompts of 1 and 22 rows, a chunk of 5 rows after 40 keys, and two rows of padding."""
    tables = mx.array([[11, 0, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 2]], mx.int32)
    cu_seqlens_q, spec = (
        np.array([0, 1, 23, 28], np.int32),
        LayerSpec(KV_HEADS, *dims, dtype, bits=bits),
    )
    tiles = mx.array(plan_tiles(cu_seqlens_q, 30, GROUP))
    q = seeded(30, HEADS, dims[0], seed=6, dtype=dtype)
    where = tables, mx.array(cu_seqlens_q), mx.array([1, 22, 45], mx.int32), tiles
    arrays, how = (q, VarlenMetadata(*where), store(spec)), {"splits": splits, "spans": spans}
    return [varlen_prefill(*arrays, scores, **how)[0]]


def varlen_prefill_of_pictures(dtype):
    """Pictures of 20 and of 4 rows, wider than a window of 3."""
    position = np.concatenate([[0], np.arange(22), np.arange(40, 45), [0, 0]])
    spans = np.stack([position, position + 1], axis=1).astype(np.int32)
    spans[2:22], spans[23:27] = (1, 21), (40, 44)
    scores = SCORES._replace(window=3)
    return varlen_prefill_rows(dtype, scores=scores, spans=mx.array(spans))


def latent_rows(dtype, splits=1, dims=(64, 16), bits=None):
    """Whole prompts of 1 and 5 rows and a chunk of 4 behind 41 keys, which end with the store, then
    two rows of padding."""
    tables = mx.array([[10, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [6, 7, 8, 9, 2, 11]], mx.int32)
    cu_seqlens_q, spec = np.array([0, 1, 6, 10], np.int32), LayerSpec(1, *dims, dtype, bits=bits)
    queries = [seeded(12, GROUP, d, seed=n, dtype=dtype) for n, d in enumerate(dims, 6)]
    tiles = mx.array(plan_tiles(cu_seqlens_q, 12, GROUP))
    where = tables, mx.array(cu_seqlens_q), mx.array([1, 5, 48], mx.int32), tiles
    arrays = *queries, VarlenMetadata(*where), store(spec)
    return list(latent_attention.latent_attention(*arrays, splits=splits, scale=SCORES.scale))


def written_by(write, new, spec):
    """The store and the queries after `rope_write` or `latent_write`."""
    written = store(spec)
    q, _ = write(new, NEW_SLOTS, written)
    mx.eval(q)  # MLX does not know that the store is written
    return [*written[:2], q]


def new_latents(dtype, bits=None, factor=1.0):
    """Rows of two products, the last slot of the store among the written, and one without."""
    latent_dim, rope = 128, 24
    q = seeded(5, GROUP * 40, seed=9, dtype=dtype)
    kv = seeded(5, latent_dim + rope, seed=13, dtype=dtype)
    norm = RMSNorm(seeded(latent_dim, seed=10, dtype=dtype), 1e-5)
    columns = Columns(q, 16), 40, GROUP, Columns(kv, 0), Columns(kv, latent_dim)
    new = NewLatents(*columns, norm, Rope(20, True, 1e4, 1.0, None, factor), POSITIONS)
    return written_by(latent_write, new, LayerSpec(1, latent_dim, rope, dtype, bits=bits))


def rope_write_rows(dtype, bits=None, factor=1.0):
    """Rows in one array, written also to the last slot.  SIMD groups outnumber heads."""
    new = new_rows(5, 6, dtype, seed=9, factor=factor)
    return written_by(rope_write, new, spec_of(dtype, bits))


def rope_write_in_turns(dtype):
    """In a step of many rows, a SIMD group serves several heads, one after another."""
    with pytest.MonkeyPatch.context() as patch:
        change_device(patch, rope_many_rows=4)
        return rope_write_rows(dtype, 4)


def gathered_rows(dtype):
    return [gather_rows(seeded(7, 40, seed=12, dtype=dtype), mx.array([[6, 0], [6, 3]], mx.int32))]


ATTENTION = {
    "kv_write": KernelTest(
        ("if (slot >= 0 && at < V_WORDS)", "if (slot > 40 && at < V_WORDS)"),
        {"": kv_write},
        faults=("does not compile",),
        serving=PLAIN,
        not_launched_by=("qwen3", "gemma3_text/w9"),  # `rope_write` writes their rows
        store="writes",
    ),
    "kv_write_quantised": KernelTest(
        ("if (slot >= 0 && head < KV", "if (slot > 40 && head < KV"),
        {"": partial(kv_write, bits=4), "wide": wide_kv_write},
        use=QUANTISED,
        serving=replace(PLAIN, kv_bits=8),
        store="writes",
    ),
    "kv_gather": KernelTest(
        ("size_t(kv_slots[key])", "size_t(kv_slots[key / 2])"),
        {"": kv_gather},
        faults=("raises",),
        serving=PLAIN,
        store="reads",
    ),
    "kv_gather_quantised": KernelTest(
        ("size_t(kv_slots[key])", "size_t(kv_slots[key / 2])"),
        {"": partial(kv_gather, bits=4)},
        use=QUANTISED,
        serving=replace(PLAIN, kv_bits=8),
        store="reads",
    ),
    "paged_decode": KernelTest(
        # The maximum is not updated.
        ("m[h] = top;\n    l[h] *= fade;", "l[h] *= fade;"),
        {
            "": paged_decode,
            "quantised": partial(paged_decode, bits=4),
            "fused": fused_decode,
            "scaled": partial(fused_decode, factor=FACTOR),
            "fused_quantised": partial(fused_decode, bits=4),
            "prefix": decode_behind_a_prefix,
            # A prefix has more splits than the lanes read at once.
            "prefix_splits": partial(decode_behind_a_prefix, splits=40, plan=(2, 2)),
        },
        serving=replace(PLAIN, wrong="!FUSED"),
        store="writes if fused",
    ),
    "fused_decode": KernelTest(
        # No split sees the newest key.
        ("split == splits - 1", "split == splits"),
        faults=("does not compile", "hangs"),
        serving=ServingCase(wrong="FUSED"),
    ),
    "merge_partitions": KernelTest(
        ("weights[p] *", "weights[0] *"),
        {"": merge_partitions},
        faults=("raises",),
        serving=PLAIN,
    ),
    "latent_attention": KernelTest(
        ("l[i] * fade + weight", "l[i] + weight"),
        {
            "": latent_rows,
            "splits": partial(latent_rows, splits=3),
            "quantised": partial(latent_rows, dims=(128, 24), bits=4),
        },
        faults=("is wrong", "does not compile", "is slow"),
        use=LATENT,
        serving=ServingCase(tiny="deepseek_v3"),
        store="reads",
    ),
    "latent_write": KernelTest(
        ("- second * sine", "+ second * sine"),
        {
            "": new_latents,
            "quantised": partial(new_latents, bits=4),
            "scaled": partial(new_latents, factor=FACTOR),
        },
        faults=("is wrong", "raises"),
        use=LATENT,
        serving=ServingCase(tiny="deepseek_v3"),
        store="writes",
    ),
    "shared_prefix": KernelTest(
        # No row sees the last key.
        ("PREFIX ? seq_len - 1", "PREFIX ? seq_len - 2"),
        faults=("ends the process",),
        serving=ServingCase(wrong="PREFIX"),
    ),
    "varlen_prefill": KernelTest(
        ("fast::exp2(", "fast::exp2(0.9f * "),
        {
            "": varlen_prefill_rows,
            # A tile of keys has more parts than its threads load at once.
            "wide_keys": partial(varlen_prefill_rows, dims=(192, 64)),
            "quantised": partial(varlen_prefill_rows, bits=4),
            "spans": varlen_prefill_of_pictures,
            "splits": partial(varlen_prefill_rows, splits=2),
            "prefix": shared_prefix_rows,
            "prefix_fused": shared_prefix_of_new_rows,
            "prefix_scaled": partial(shared_prefix_of_new_rows, factor=FACTOR),
            "prefix_quantised": partial(shared_prefix_rows, dim=128, bits=8),
        },
        faults=("does not compile", "is slow"),
        serving=ServingCase(wrong="!SPLIT && !PREFIX"),
        store="reads",
    ),
    "split_prefill": KernelTest(
        # A split begins where the one before it begins.
        ("+ split * per_split", "+ (PREFIX ? split : metal::max(split - 1, 0)) * per_split"),
        faults=("is wrong", "is slow"),
        serving=ServingCase(wrong="SPLIT", few_rows=256),
    ),
    "rope_write": KernelTest(
        # A fast sine, which does not reduce large angles.
        ("precise::sin(theta)", "precise::sin(theta + 1e-7f * theta)"),
        {
            "": rope_write_rows,
            "quantised": partial(rope_write_rows, bits=4),
            "quantised_in_turns": rope_write_in_turns,
            "scaled": partial(rope_write_rows, factor=FACTOR),
        },
        store="writes",
    ),
    "gather_rows": KernelTest(
        ("size_t(row) * WIDTH", "size_t(row / 2) * WIDTH"),
        {"": gathered_rows},
        faults=("ends the process",),
        serving=PLAIN,
    ),
}
