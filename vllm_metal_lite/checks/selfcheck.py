"""Checks the kernels of attention on this device against the reference.

A check launches the variants that serving launches, so that its compilation is not wasted.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.checks.case import CONTEXTS, Case, case_of, draw, padded
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.result import TOLERANCE, largest_error
from vllm_metal_lite.config import BLOCK_SIZES
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_attention import Where, decode_tiles, latent_attention
from vllm_metal_lite.kernels.prefill import plan_tiles, varlen_prefill
from vllm_metal_lite.kernels.shared_prefix import shared_prefix
from vllm_metal_lite.kv.row_format import RowFormat
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.specs import AttentionShape, KernelUse, Rotation

# Of a context in one piece, and of one in several: the plans of serving.
WHOLE, SPLIT = DecodePlan(1, 8), DecodePlan(4, 4)
# The longest decodes that share a prefix, and the splits of the prefix.
SHARING, PREFIX_SPLITS = 3, 16

Found = tuple[float, float]


def full_list() -> list[KernelUse]:
    """Uses that vary each dimension in turn: many more than a model has."""
    heads = ((4, 4), (8, 2), (5, 1), (16, 8), (24, 2), (71, 1))
    dims = ((32, 32), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128),
            (192, 192), (256, 256))  # fmt: skip
    extras = ({"window": 20}, {"softcap": 5.0}, {"sinks": True},
              {"window": 70, "softcap": 20.0, "sinks": True})  # fmt: skip
    cases = []
    for dtype in TOLERANCE:
        cases += [(AttentionShape(*h, 64, 64, dtype), 16) for h in heads]
        cases += [(AttentionShape(4, 2, *d, dtype), 16) for d in dims]
        cases += [(AttentionShape(8, 2, 128, 128, dtype, **e), 16) for e in extras]
        cases += [(AttentionShape(4, 2, 128, 128, dtype), bs) for bs in BLOCK_SIZES]
        cases += [
            (AttentionShape(8, 2, *d, dtype, kv_bits=bits), 16)
            for bits in (8, 4)
            for d in ((64, 64), (80, 80), (128, 128), (192, 128))
        ]
        cases += [
            (AttentionShape(heads, 1, rank, rope, dtype, latent=True, kv_bits=bits), 16)
            for heads, rank, rope in ((20, 512, 64), (40, 256, 32), (64, 512, 64))
            for bits in (None, 8, 4)
        ]
    turns = Rotation(64, traditional=True), Rotation(32, base=None)  # of rotary keys
    return [
        KernelUse((shape,), block_size, turns if shape.latent else ())
        for shape, block_size in cases
    ]


def write(check: Check) -> Found:
    """Rows written to an empty store; every third row has a negative slot."""
    case = case_of(check.shape, check.block_size)
    keys, values = map(mx.zeros_like, case.store())
    target = case.owned.astype(np.int32)
    target[::3] = -1
    k, v = (case.array(drawn[case.owned]) for drawn in case.drawn)
    mx.eval(keys, values, k, v)
    mx.eval(kv_write(k, v, mx.array(target), keys, values, new_token(), case.spec))
    expected = [np.zeros_like(drawn) for drawn in case.drawn]
    for rows, drawn in zip(expected, case.drawn, strict=True):
        rows[target[target >= 0]] = drawn[target[target >= 0]]
    error = stored_error((keys, values), case.spec, expected)
    return error, 1.0 if case.shape.kv_bits else 0.0


def gather(check: Check) -> Found:
    """Slots in random order."""
    case = case_of(check.shape, check.block_size)
    slots = np.random.default_rng(1).choice(case.owned, 74).astype(np.int32)
    got = kv_gather(mx.array(slots), *case.store(), new_token(), case.spec)[:2]
    expected = [rows[slots].swapaxes(0, 1) for rows in (case.keys, case.values)]
    return largest(got, expected), TOLERANCE[check.shape.dtype] if check.shape.kv_bits else 0.0


def decode(check: Check, plan: DecodePlan) -> Found:
    """One query per sequence, and a row of padding."""
    case = case_of(check.shape, check.block_size)
    q = case.q[: len(CONTEXTS)]
    out, _ = paged_decode(
        case.array(padded(q)), *decode_arrays(case.decodes), *case.store(), new_token(),
        plan=plan, spec=case.spec, **case.how(),
    )  # fmt: skip
    return _compare(case, case.decodes, q, out)


def prefill(check: Check) -> Found:
    """Whole prompts and chunks, with one row of padding."""
    case = case_of(check.shape, check.block_size)
    batch, q = case.prompts, padded(case.q)
    tiles = plan_tiles(
        batch.cu_seqlens_q, len(q), check.shape.num_heads // check.shape.num_kv_heads
    )
    out, _ = varlen_prefill(
        case.array(q), mx.array(batch.block_tables), mx.array(batch.cu_seqlens_q),
        mx.array(batch.seq_lens), mx.array(tiles), *case.store(), new_token(), spec=case.spec,
        **case.how(),
    )  # fmt: skip
    return _compare(case, batch, case.q, out)


def latents(check: Check, splits: int) -> Found:
    """One query per sequence, and a row of padding."""
    case = case_of(check.shape, check.block_size)
    tables, seq_lens = decode_arrays(case.decodes)
    cu_seqlens_q, tiles = decode_tiles(len(CONTEXTS) + 1, check.shape.num_heads)
    where = tables, cu_seqlens_q, seq_lens, tiles
    return _latents(case, case.decodes, where, splits)


def latent_prompts(check: Check) -> Found:
    """Whole prompts and chunks, with one row of padding."""
    case = case_of(check.shape, check.block_size)
    batch = case.prompts
    tiles = plan_tiles(batch.cu_seqlens_q, len(case.q) + 1, check.shape.num_heads)
    lens = mx.array(batch.cu_seqlens_q), mx.array(batch.seq_lens)
    return _latents(case, batch, (mx.array(batch.block_tables), *lens, mx.array(tiles)), 1)


def _latents(case: Case, batch: ForwardBatch, where: Where, splits: int) -> Found:
    assert case.q_pe is not None
    q, q_pe = case.q[: batch.num_tokens], case.q_pe[: batch.num_tokens]
    out, _ = latent_attention(
        case.array(padded(q)), case.array(padded(q_pe)), *where, *case.store(), new_token(),
        block_size=case.block_size, scale=case.how()["scale"], splits=splits, spec=case.spec,
    )  # fmt: skip
    return _compare(case, batch, q, out)


def merged(check: Check) -> Found:
    if check.shape.latent:
        return latents(check, SPLIT.splits)
    return (shared if check.prefix else decode)(check, SPLIT)


def shared(check: Check, plan: DecodePlan) -> Found:
    """Some sequences share a prefix, in many splits.  plan: of their own keys."""
    case = case_of(check.shape, check.block_size)
    batch, lens = case.sharing(SHARING)
    q, how = case.q[: len(CONTEXTS)], case.how()
    sinks, _ = how.pop("sinks"), how.pop("window")
    rows, store, where = case.array(padded(q)), case.store(), decode_arrays(batch)
    prefix = shared_prefix(
        rows, *where, mx.array([len(CONTEXTS) - 1], mx.int32), mx.array(padded(lens)), *store,
        new_token(), splits=PREFIX_SPLITS, spec=case.spec, **how,
    )  # fmt: skip
    out, _ = paged_decode(
        rows, *where, *store, prefix.lse, plan=plan, prefix=prefix, sinks=sinks, spec=case.spec,
        **how,
    )  # fmt: skip
    return _compare(case, batch, q, out)


def rows(check: Check) -> Found:
    """Queries in random order, some of them more than once."""
    shape, rng = check.shape, np.random.default_rng(0)
    q = draw(rng, (50, shape.num_heads, shape.k_head_dim), shape.dtype)
    index = rng.integers(0, 50, (3, 31)).astype(np.int32)
    got = gather_rows(mx.array(q).astype(shape.dtype), mx.array(index))
    return largest_error(got, q[index]), 0.0


def decode_arrays(batch: ForwardBatch) -> tuple[mx.array, mx.array]:
    """Block tables and sequence lengths of decodes and of a row of padding."""
    return mx.array(padded(batch.block_tables)), mx.array(padded(batch.seq_lens))


def largest(got: Sequence[mx.array], expected: Sequence[np.ndarray]) -> float:
    return max(largest_error(a, wanted) for a, wanted in zip(got, expected, strict=True))


def _compare(case: Case, batch: ForwardBatch, q: np.ndarray, out: mx.array) -> Found:
    expected = padded(case.expected(batch, q, case.keys, case.values))
    return largest_error(out, expected), TOLERANCE[case.shape.dtype]


def stored_error(
    store: Sequence[mx.array], spec: LayerSpec, expected: Sequence[np.ndarray], rounding: float = 0
) -> float:
    """The largest error of K and V in a store; a quantised one's as a fraction of what may be lost.

    rounding: of the values before they were stored, relative to 1 + |value|.
    """
    rows = zip(store, (spec.k_row, spec.v_row), expected, strict=True)
    return max(
        largest_error(row.unpack(array), wanted, _lost(row, wanted, rounding))
        for array, row, wanted in rows
    )


def _lost(row: RowFormat, values: np.ndarray, rounding: float) -> np.ndarray | None:
    """The largest change by quantisation of each value: half a step, plus rounding to the dtype.

    None: rows of this format are not quantised.
    """
    if row.bits is None:
        return None
    groups = values.reshape(*values.shape[:-1], -1, row.group_size)
    step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / ((1 << row.bits) - 1)
    rounded = (TOLERANCE[row.dtype] + rounding) * (1 + np.abs(groups))
    return (0.5 * step + rounded).reshape(values.shape)


CHECKS: dict[str, Callable[[Check], Found]] = {
    "kv_write": write,
    "kv_write_quantised": write,
    "kv_gather": gather,
    "kv_gather_quantised": gather,
    "paged_decode": lambda check: decode(check, WHOLE),
    "merge_partitions": merged,
    "latent_attention": lambda check: latents(check, 1),
    "latent_prefill": latent_prompts,
    "shared_prefix": lambda check: shared(check, WHOLE),
    "varlen_prefill": prefill,
    "gather_rows": rows,
}
