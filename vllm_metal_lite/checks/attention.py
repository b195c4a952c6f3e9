"""The kernels of attention: when a model uses them, their checks against the reference, and their
timing beside their fallbacks.

A check launches the instantiations that serving launches, so that its compilation is not wasted.
The timing attends as serving does: `KernelAttention` with the kernel and without it.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from vllm_metal_lite.attention.paged.attention import plan_tiles
from vllm_metal_lite.attention.pending_heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.pictures import sees_spans
from vllm_metal_lite.checks.case import CONTEXTS, Case, TimedStore, case_of, heads_only, rows_only
from vllm_metal_lite.checks.check import AttentionCheck, Check, Loads, Pair
from vllm_metal_lite.checks.new_rows import new_rows, tolerance
from vllm_metal_lite.checks.values import (
    TOLERANCE,
    draw,
    largest,
    largest_error,
    padded,
    rounded,
    store_error,
)
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_attention import decode_metadata, latent_attention
from vllm_metal_lite.kernels.prefill import VarlenMetadata, attend_tiles, varlen_prefill
from vllm_metal_lite.kernels.rope_write import NewRows
from vllm_metal_lite.kernels.served_shapes import attention_problem, sees_prefixes
from vllm_metal_lite.kernels.shared_prefix import shared_prefix
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.specs import AttentionShape, KernelUse

# The plans of serving for a context in one split, and in several.
WHOLE, SPLIT = DecodePlan(1, 8), DecodePlan(4, 4)
# How many decodes, the longest, share a prefix; and the splits of that prefix.
SHARING, PREFIX_SPLITS = 3, 16


def checks(use: KernelUse) -> list[Check]:
    return [check for shape in use.shapes for check in _checks(shape, use)]


def _checks(shape: AttentionShape, use: KernelUse) -> list[Check]:
    rows, size = rows_only(shape), use.block_size
    suffix = "" if shape.kv_bits is None else "_quantised"
    checks = [Check(f"kv_write{suffix}", rows, size), Check(f"kv_gather{suffix}", rows, size)]
    if shape.latent:
        names = "latent_attention", "merge_partitions", "latent_prefill"
        checks += [Check(name, shape, size) for name in names]
        wide = replace(shape, k_head_dim=shape.k_head_dim + shape.v_head_dim)
        return [*checks, Check("gather_rows", heads_only(wide))]
    checks += [Check("paged_decode", shape, size), Check("merge_partitions", shape, size)]
    if attention_problem(shape, prefill=True) is None:
        spans = use.spans != "" and sees_spans(use.spans == "sliding", shape.window)
        checks.append(Check("varlen_prefill", shape, size, spans=spans))
        checks.append(Check("split_prefill", shape, size))
    if use.shares_prefix and sees_prefixes(shape):
        checks.append(Check("shared_prefix", shape, size))
        beside = "varlen_prefill", "shared_prefix"
        checks.append(Check("merge_partitions", shape, size, beside=beside))
    checks.append(Check("gather_rows", heads_only(shape)))
    return checks


def write(check: AttentionCheck) -> float:
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


def gather(check: AttentionCheck) -> float:
    """Slots in random order."""
    case = case_of(check.shape, check.block_size)
    slots = np.random.default_rng(1).choice(case.owned, 74).astype(np.int32)
    got = kv_gather(mx.array(slots), case.store())[:2]
    expected = [rows[slots].swapaxes(0, 1) for rows in (case.keys, case.values)]
    return largest(got, expected, TOLERANCE[check.shape.dtype] if check.shape.kv_bits else 0.0)


def decode(check: AttentionCheck) -> float:
    """One query per sequence, and a row of padding; each context in one split, or in several."""
    case = case_of(check.shape, check.block_size)
    plan = SPLIT if check.kernel == "merge_partitions" else WHOLE
    if check.shape.latent:
        return _latent_decode(case, plan)
    return (_plain_decode if check.rope is None else _fused_decode)(check, case, plan)


def _latent_decode(case: Case, plan: DecodePlan) -> float:
    tables, seq_lens = _decode_arrays(case.decodes)
    metadata = decode_metadata(tables, seq_lens, len(seq_lens), case.shape.num_heads)
    return _latents(case, case.decodes, metadata, plan.splits)


def _plain_decode(check: AttentionCheck, case: Case, plan: DecodePlan) -> float:
    """The queries are ready, and the store holds all rows."""
    q = case.q[: len(CONTEXTS)]
    batch, out = _paged_decode(check, case, plan, case.array(padded(q)), case.store())
    return _compare(case, batch, q, out)


def _fused_decode(check: AttentionCheck, case: Case, plan: DecodePlan) -> float:
    """The decodes normalise, rotate and write their own rows, which the reference reads back.

    The positions differ from seq_len - 1, as behind pictures.
    """
    assert check.rope is not None
    positions = padded(CONTEXTS // 2)
    rows, (fresh_q, *fresh) = new_rows(check.shape, positions, check.rope)
    q = rounded(fresh_q[:-1], check.shape.dtype)
    store, after = _newest(case, fresh)
    mx.eval(rows.arrays)
    batch, out = _paged_decode(check, case, plan, rows, store)
    written = [
        np.array(row.unpack(stored).astype(mx.float32))
        for row, stored in zip(case.formats, store[:2], strict=True)
    ]
    rounding = tolerance(check, int(positions.max()))
    error = largest_error(out, padded(case.expected(batch, q, *written)), rounding)
    return max(error, store_error(store, after, rounding))


def _paged_decode(
    check: AttentionCheck, case: Case, plan: DecodePlan, rows: mx.array | NewRows, store: LayerStore
) -> tuple[ForwardBatch, mx.array]:
    """The batch and the kernel's results.  With `shared_prefix` some sequences share a prefix, in
    many splits."""
    shares = "shared_prefix" in (check.kernel, *check.beside)
    batch, lens = case.sharing(SHARING) if shares else (case.decodes, np.zeros(0, np.int32))
    where, scores, prefix = _decode_arrays(batch), case.scores(), None
    if shares:
        leader, lens_of_rows = mx.array([len(CONTEXTS) - 1], mx.int32), mx.array(padded(lens))
        arrays = rows, where[0], leader, lens_of_rows, store
        prefix = shared_prefix(*arrays, scores, splits=PREFIX_SPLITS)
        store = store._replace(ticket=prefix.lse)
    out, ticket = paged_decode(rows, *where, store, scores, plan=plan, prefix=prefix)
    mx.eval(out, ticket)
    return batch, out


def _newest(case: Case, fresh: list[np.ndarray]) -> tuple[LayerStore, list[np.ndarray]]:
    """The store before the decodes write their rows, which are NaN, and the values after."""
    before, after, newest = [], [], case.decodes.slot_mapping()
    for row, stored, held, new in zip(
        case.formats, case.stored, (case.keys, case.values), fresh, strict=True
    ):
        stored, held = stored.copy(), held.copy()
        stored[newest] = 0xFFFFFFFF if row.bits else np.nan
        held[newest] = rounded(new[:-1], case.shape.dtype)
        before.append(mx.array(stored).astype(row.kept_dtype))
        after.append(held)
    mx.eval(before)
    keys, values = before
    return LayerStore(keys, values, new_ticket(), case.spec, case.block_size), after


def prefill(check: AttentionCheck) -> float:
    """Check whole prompts and chunks with one row of padding, then with spans if rows see them.
    `split_prefill` runs in several splits."""
    case, shape = case_of(check.shape, check.block_size), check.shape
    batch, q = case.prompts, padded(case.q)
    tiles = plan_tiles(batch.cu_seqlens_q, len(q), shape.num_heads // shape.num_kv_heads)
    arrays = batch.block_tables[0], batch.cu_seqlens_q, batch.seq_lens, tiles
    metadata = VarlenMetadata(*map(mx.array, arrays))
    if shape.latent:
        return _latents(case, batch, metadata, splits=1)
    rows, scores = case.array(q), case.scores()

    def error(batch: ForwardBatch) -> float:
        seen = None if batch.spans is None else mx.array(padded(batch.spans))
        out, _ = varlen_prefill(rows, metadata, case.store(), scores, spans=seen)
        return _compare(case, batch, case.q, out)

    if check.kernel != "split_prefill":
        return max(error(batch), error(case.seeing)) if check.spans else error(batch)
    in_splits = attend_tiles(rows, metadata, case.store(), scores, len(tiles), SPLIT.splits)
    partial, lse = map(np.array, in_splits)
    weights = np.exp2(lse - lse.max(2, keepdims=True))[..., None]
    merged = (weights * partial).sum(2) / weights.sum(2)
    return _compare(case, batch, case.q, mx.array(merged))


def _latents(case: Case, batch: ForwardBatch, metadata: VarlenMetadata, splits: int) -> float:
    assert case.q_pe is not None
    q, q_pe = case.q[: batch.num_tokens], case.q_pe[: batch.num_tokens]
    arrays = case.array(padded(q)), case.array(padded(q_pe)), metadata, case.store()
    out, _ = latent_attention(*arrays, splits=splits, scale=case.scores().scale)
    return _compare(case, batch, q, out)


def reorder(check: AttentionCheck) -> float:
    """Queries in random order, some of them more than once."""
    shape, rng = check.shape, np.random.default_rng(0)
    q = draw(rng, (50, shape.num_heads, shape.k_head_dim), shape.dtype)
    index = rng.integers(0, 50, (3, 31)).astype(np.int32)
    got = gather_rows(mx.array(q).astype(shape.dtype), mx.array(index))
    return largest_error(got, q[index])


def timed_decode(check: AttentionCheck, loads: Loads) -> list[Pair]:
    return _timed(check, loads.decodes, loads.context)


def timed_merge(check: AttentionCheck, loads: Loads) -> list[Pair]:
    return _timed(check, 1, loads.long)


def timed_split(check: AttentionCheck, loads: Loads) -> list[Pair]:
    return _timed(check, 1, loads.long, rows=loads.drafted)


def timed_prefix(check: AttentionCheck, loads: Loads) -> list[Pair]:
    return _timed(check, loads.decodes, loads.prefix + 128, loads.prefix)


def _timed(
    check: AttentionCheck, count: int, context: int, prefix: int = 0, rows: int = 1
) -> list[Pair]:
    how = {"prefix": prefix, "block_size": check.block_size}
    load = TimedStore(check.shape, count, context, rows, **how)
    q = load.queries()
    return [(partial(load.attention(), q), partial(load.attention(without=check.kernel), q))]


def timed_prefill(check: AttentionCheck, loads: Loads) -> list[Pair]:
    """Prompts read in place, and gathered."""
    pairs: list[Pair] = []
    for sizes in loads.prompts:
        load = TimedStore(check.shape, *sizes, block_size=check.block_size)
        q = load.queries()
        pairs.append((partial(load.attention("varlen"), q), partial(load.attention("gather"), q)))
    return pairs


def timed_fused_decode(check: AttentionCheck, loads: Loads) -> list[Pair]:
    """One launch for decodes, and `rope_write` before `paged_decode`."""
    assert check.rope is not None
    shape, dim = check.shape, check.shape.k_head_dim
    load = TimedStore(shape, loads.decodes, loads.context, block_size=check.block_size)
    new, _ = new_rows(shape, load.batch.positions, check.rope)
    mx.eval(new.arrays)
    heads = (
        Heads(new.q, shape.num_heads, dim, new.q_norm, new.rope),
        Heads(new.k, shape.num_kv_heads, dim, new.k_norm, new.rope),
        Heads(new.v, shape.num_kv_heads, shape.v_head_dim),
    )
    fused, unfused = load.attention(), load.attention(without=check.kernel)
    return [(partial(fused, heads), partial(unfused, heads))]


def timed_reorder(check: AttentionCheck, loads: Loads) -> list[Pair]:
    shape = check.shape
    q = mx.random.normal((loads.rows, shape.num_heads, shape.k_head_dim)).astype(shape.dtype)
    index = mx.array(np.random.default_rng(0).permutation(loads.rows).astype(np.int32))
    mx.eval(q, index)
    return [(lambda: gather_rows(q, index), lambda: q[index])]


def _decode_arrays(batch: ForwardBatch) -> tuple[mx.array, mx.array]:
    """Block tables and sequence lengths of decodes and of a row of padding."""
    return mx.array(padded(batch.block_tables[0])), mx.array(padded(batch.seq_lens))


def _compare(case: Case, batch: ForwardBatch, q: np.ndarray, out: mx.array) -> float:
    expected = padded(case.expected(batch, q, case.keys, case.values))
    return largest_error(out, expected, TOLERANCE[case.shape.dtype])
