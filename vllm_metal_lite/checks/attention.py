"""Checks the kernels of attention on this device against the reference.

A check launches the instantiations that serving launches, so that its compilation is not wasted.
"""

import numpy as np

from vllm_metal_lite.attention.paged.varlen_prompts import plan_tiles
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.checks.accuracy import TOLERANCE, largest, largest_error, store_error
from vllm_metal_lite.checks.case import CONTEXTS, Case, case_of
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.new_rows import new_rows, tolerance
from vllm_metal_lite.checks.values import draw, padded, rounded
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_attention import decode_metadata, latent_attention
from vllm_metal_lite.kernels.new_rows import NewRows
from vllm_metal_lite.kernels.prefill import VarlenMetadata, varlen_prefill
from vllm_metal_lite.kernels.shared_prefix import shared_prefix
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.specs import AttentionShape

# Plans of serving: for a context in one piece, and for one in several.
WHOLE, SPLIT = DecodePlan(1, 8), DecodePlan(4, 4)
# The longest decodes that share a prefix, and the splits of the prefix.
SHARING, PREFIX_SPLITS = 3, 16


def write(check: Check[AttentionShape]) -> float:
    """Rows written to an empty store; every third row has a negative slot."""
    case = case_of(check.shape, check.block_size)
    keys, values = map(mx.zeros_like, case.store()[:2])
    store = LayerStore(keys, values, new_ticket(), case.spec)
    target = case.owned.astype(np.int32)
    target[::3] = -1
    k, v = (case.array(drawn[case.owned]) for drawn in case.drawn)
    mx.eval(keys, values, k, v)
    mx.eval(kv_write(k, v, mx.array(target), store))
    expected = [np.zeros_like(drawn) for drawn in case.drawn]
    for rows, drawn in zip(expected, case.drawn, strict=True):
        rows[target[target >= 0]] = drawn[target[target >= 0]]
    return store_error(store, expected)


def gather(check: Check[AttentionShape]) -> float:
    """Slots in random order."""
    case = case_of(check.shape, check.block_size)
    slots = np.random.default_rng(1).choice(case.owned, 74).astype(np.int32)
    got = kv_gather(mx.array(slots), case.store())[:2]
    expected = [rows[slots].swapaxes(0, 1) for rows in (case.keys, case.values)]
    return largest(got, expected, TOLERANCE[check.shape.dtype] if check.shape.kv_bits else 0.0)


def decode(check: Check[AttentionShape]) -> float:
    """One query per sequence, and a row of padding.

    With a rotation, decodes normalise, rotate and write their own rows.  With `shared_prefix` some
    sequences share a prefix, in many splits.
    """
    plan = SPLIT if check.kernel == "merge_partitions" else WHOLE
    case = case_of(check.shape, check.block_size)
    if check.shape.latent:
        tables, seq_lens = decode_arrays(case.decodes)
        metadata = decode_metadata(tables, seq_lens, len(seq_lens), check.shape.num_heads)
        return _latents(case, case.decodes, metadata, plan.splits)
    shares = "shared_prefix" in (check.kernel, *check.beside)
    batch, lens = case.sharing(SHARING) if shares else (case.decodes, np.zeros(0, np.int32))
    rows: mx.array | NewRows
    if check.rope is None:
        q, store = case.q[: len(CONTEXTS)], case.store()
        rows = case.array(padded(q))
    else:
        rows, (fresh_q, *fresh) = new_rows(check.shape, padded(CONTEXTS - 1), check.rope)
        q = rounded(fresh_q[:-1], check.shape.dtype)
        store, after = _newest(case, fresh)
        mx.eval(rows.arrays)
    where, scores, prefix = decode_arrays(batch), case.scores(), None
    if shares:
        leader, lens_of_rows = mx.array([len(CONTEXTS) - 1], mx.int32), mx.array(padded(lens))
        arrays = rows, *where, leader, lens_of_rows, store
        prefix = shared_prefix(*arrays, scores, splits=PREFIX_SPLITS)
        store = store._replace(ticket=prefix.lse)
    out, ticket = paged_decode(rows, *where, store, scores, plan=plan, prefix=prefix)
    if check.rope is None:
        return _compare(case, batch, q, out)
    mx.eval(out, ticket)
    stored = [
        np.array(row.unpack(kept).astype(mx.float32))
        for row, kept in zip(case.formats, store[:2], strict=True)
    ]
    rounding = tolerance(check, int(CONTEXTS.max()))
    error = largest_error(out, padded(case.expected(batch, q, *stored)), rounding)
    return max(error, store_error(store, after, rounding))


def _newest(case: Case, fresh: list[np.ndarray]) -> tuple[LayerStore, list[np.ndarray]]:
    """The case's store before the newest rows are written, and its values after."""
    before, after, newest = [], [], case.decodes.slot_mapping()
    for row, kept, rows, new in zip(
        case.formats, case.kept, (case.keys, case.values), fresh, strict=True
    ):
        kept, rows = kept.copy(), rows.copy()
        kept[newest] = 0xFFFFFFFF if row.bits else np.nan
        rows[newest] = rounded(new[:-1], case.shape.dtype)
        before.append(mx.array(kept).astype(row.kept_dtype))
        after.append(rows)
    mx.eval(before)
    keys, values = before
    return LayerStore(keys, values, new_ticket(), case.spec, case.block_size), after


def prefill(check: Check[AttentionShape]) -> float:
    """Whole prompts and chunks, with one row of padding."""
    case, shape = case_of(check.shape, check.block_size), check.shape
    batch, q = case.prompts, padded(case.q)
    tiles = plan_tiles(batch.cu_seqlens_q, len(q), shape.num_heads // shape.num_kv_heads)
    arrays = batch.block_tables[0], batch.cu_seqlens_q, batch.seq_lens, tiles
    metadata = VarlenMetadata(*map(mx.array, arrays))
    if shape.latent:
        return _latents(case, batch, metadata, splits=1)
    out, _ = varlen_prefill(case.array(q), metadata, case.store(), case.scores())
    return _compare(case, batch, case.q, out)


def _latents(case: Case, batch: ForwardBatch, metadata: VarlenMetadata, splits: int) -> float:
    assert case.q_pe is not None
    q, q_pe = case.q[: batch.num_tokens], case.q_pe[: batch.num_tokens]
    arrays = case.array(padded(q)), case.array(padded(q_pe)), metadata, case.store()
    out, _ = latent_attention(*arrays, splits=splits, scale=case.scores().scale)
    return _compare(case, batch, q, out)


def rows(check: Check[AttentionShape]) -> float:
    """Queries in random order, some of them more than once."""
    shape, rng = check.shape, np.random.default_rng(0)
    q = draw(rng, (50, shape.num_heads, shape.k_head_dim), shape.dtype)
    index = rng.integers(0, 50, (3, 31)).astype(np.int32)
    got = gather_rows(mx.array(q).astype(shape.dtype), mx.array(index))
    return largest_error(got, q[index])


def decode_arrays(batch: ForwardBatch) -> tuple[mx.array, mx.array]:
    """Block tables and sequence lengths of decodes and of a row of padding."""
    return mx.array(padded(batch.block_tables[0])), mx.array(padded(batch.seq_lens))


def _compare(case: Case, batch: ForwardBatch, q: np.ndarray, out: mx.array) -> float:
    expected = padded(case.expected(batch, q, case.keys, case.values))
    return largest_error(out, expected, TOLERANCE[case.shape.dtype])
