"""The kernels as functions: shapes, template values and grids, one function a kernel.

Every function that touches the store takes a token and returns the next one: pass to each the token
that the one before it returned, and no other (metal/kv_write.metal says why).  A token is a float32
array of any shape; its values mean nothing.

Shapes: keys (slots, num_kv_heads, k_head_dim) and values (slots, num_kv_heads, v_head_dim) are one
layer's store; metadata is int32; B sequences, N packed rows.  A store that keeps 8 or 4 bits a
value has rows of words instead, and its `spec` must be given.
"""

import math
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Kernel, Template
from vllm_metal_lite.kv.row_format import RowFormat
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.specs import AttentionShape

if TYPE_CHECKING:
    from vllm_metal_lite.kernels.new_rows import NewRows
    from vllm_metal_lite.kernels.shared_prefix import SharedPrefix

_STORE = ["keys", "values", "token"]
_KV_WRITE = Kernel("kv_write", ["k", "v", "slot_mapping", *_STORE], ["next_token"])
_KV_GATHER = Kernel("kv_gather", ["kv_slots", *_STORE], ["k", "v", "next_token"])
_KV_WRITE_QUANTISED = Kernel("kv_write_quantised", _KV_WRITE.inputs, _KV_WRITE.outputs)
_KV_GATHER_QUANTISED = Kernel("kv_gather_quantised", _KV_GATHER.inputs, _KV_GATHER.outputs)
_PAGED_DECODE = Kernel(
    "paged_decode",
    ["q", "k", "v", "q_weight", "k_weight", "freqs", "block_tables", "seq_lens", "sinks",
     "prefix", "prefix_lse", "prefix_lens", *_STORE],
    ["out", "lse"],
)  # fmt: skip
# What a kernel is told of new rows where there are none.
NONE_NEW = {
    **dict.fromkeys(("DIMS", "TRADITIONAL", "ROPE_SCALE", "LOG2_BASE", "FREQS"), 0),
    **{f"{x}_{of}": 0 for x in "QKV" for of in ("WIDTH", "START")},
    **{f"{x}_{of}": 0 for x in "QK" for of in ("NORM", "WEIGHT", "EPS")},
    "Q_R": mx.float32, "K_R": mx.float32,
}  # fmt: skip
_MERGE = Kernel("merge_partitions", ["partial", "lse"], ["out"])


# Most parts that a context is cut into.
MAX_SPLITS = 64
# Threadgroups that keep the device busy: below it contexts are cut.  Measured on an H200 (132
# cores); a guess for Metal.
_FILL = {"metal": 128, "cuda": 256, "cpu": 16}
# Shortest context that is worth cutting, for the parts must be merged, and fewest keys of a part.
_MIN_CONTEXT, _MIN_SPLIT = 1024, 256
# Largest heads.
MAX_DECODE_DIM, MAX_PREFILL_DIM = 576, 256
# Floats of queries that a lane keeps; as many again are its sums.
_REGISTERS = 64


class DecodePlan(NamedTuple):
    """splits: parts that each context is cut into.  simdgroups: of the threadgroup of each part."""

    splits: int
    simdgroups: int


def decode_plan(batch: int, num_kv_heads: int, max_seq_len: int) -> DecodePlan:
    """Enough threadgroups to fill the device, not more: merging costs a launch.

    Many threadgroups are smaller ones, so that more of them run side by side.
    """
    splits, groups, fill = 1, batch * num_kv_heads, _FILL[backend.name()]
    if max_seq_len >= _MIN_CONTEXT:
        splits = num_splits(fill // groups, max_seq_len, _MIN_SPLIT)
    small = groups >= 2 * fill if splits == 1 else max_seq_len // splits <= 512
    return DecodePlan(splits, 4 if small else 8)


def num_splits(most: int, num_keys: int, min_keys: int) -> int:
    """Parts that num_keys are cut into, at most `most`, of min_keys each or more.

    A power of two, so that few variants of a compiled step exist.
    """
    splits = max(1, min(most, num_keys // min_keys, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def unsupported(shape: AttentionShape, prefill: bool = False) -> str | None:
    """Why the kernels (prefill: `varlen_prefill`) cannot serve this shape, or None if they can."""
    if shape.latent:
        return "there is no kernel for latent attention yet"
    if shape.chunk is not None:
        return "there is no kernel for chunked attention yet"
    if shape.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return f"there are no kernels for {shape.dtype}"
    if shape.kv_bits is not None and prefill:
        return "varlen_prefill does not read a quantised store"
    largest = MAX_PREFILL_DIM if prefill else MAX_DECODE_DIM
    return head_size_problem((shape.k_head_dim, shape.v_head_dim), largest)


def head_size_problem(dims: Iterable[int], largest: int) -> str | None:
    """Why a kernel cannot serve heads of these sizes, or None if it can."""
    for dim in dims:
        if dim % 8 or not 8 <= dim <= largest:
            return f"head size {dim} is not a multiple of 8 up to {largest}"
    return None


def new_token() -> mx.array:
    """The token of a store that nothing was written to yet."""
    return mx.zeros(8)


@cache
def bits(x: float) -> int:
    """The bits of a float32: a template value must be an integer."""
    return int(np.float32(x).view(np.int32))


@cache
def no_sinks() -> mx.array:
    """What a kernel takes for sinks where there are none."""
    zeros = mx.zeros(8)
    mx.eval(zeros)  # or every compiled step would make its own
    return zeros


def kv_write(
    k: mx.array, v: mx.array, slot_mapping: mx.array, keys: mx.array, values: mx.array,
    token: mx.array, spec: LayerSpec | None = None,
) -> mx.array:  # fmt: skip
    """Write rows k (N, num_kv_heads, k_head_dim), v likewise, at slots (N,); negative: skipped."""
    rows, kv_heads, k_dim = k.shape
    if spec and spec.bits:
        groups = (row.dim // row.group_size for row in (spec.k_row, spec.v_row))
        threads, groups = cover(kv_heads * max(groups))
        return _KV_WRITE_QUANTISED(
            [k, v, slot_mapping, keys, values, token],
            {"T": k.dtype, "KV_HEADS": kv_heads, **_format(spec.k_row, spec.v_row)},
            (groups, rows, 1), threads, [(1,)], [mx.float32],
        )[0]  # fmt: skip
    k_words, v_words = _words(kv_heads * k_dim, k), _words(kv_heads * v.shape[2], v)
    width = math.gcd(k_words, v_words, 4)
    threads, groups = cover(max(k_words, v_words) // width)
    template = {"T": k.dtype, "KV_HEADS": kv_heads, "K_DIM": k_dim, "V_DIM": v.shape[2], "W": width}
    return _KV_WRITE(
        [k, v, slot_mapping, keys, values, token],
        template, (groups, rows, 1), threads, [(1,)], [mx.float32],
    )[0]  # fmt: skip


def kv_gather(
    kv_slots: mx.array, keys: mx.array, values: mx.array, token: mx.array,
    spec: LayerSpec | None = None,
) -> tuple[mx.array, mx.array, mx.array]:  # fmt: skip
    """Copy slots (any shape) out of the store -> K and V (*shape, num_kv_heads, head_dim), the
    token."""
    slots, shape = kv_slots.reshape(-1), kv_slots.shape
    if spec and spec.bits:
        heads, k_row, v_row = spec.num_kv_heads, spec.k_row, spec.v_row
        threads, groups = cover(heads * max(k_row.value_words, v_row.value_words))
        return tuple(_KV_GATHER_QUANTISED(
            [slots, keys, values, token],
            {"T": spec.dtype, "KV_HEADS": heads, "THREADS": threads, **_format(k_row, v_row)},
            (slots.size, groups, 1), threads,
            [(*shape, heads, row.dim) for row in (k_row, v_row)] + [(1,)],
            [spec.dtype, spec.dtype, mx.float32],
        ))  # fmt: skip
    _, kv_heads, k_dim = keys.shape
    v_dim = values.shape[2]
    k_words, v_words = _words(kv_heads * k_dim, keys), _words(kv_heads * v_dim, values)
    width = math.gcd(k_words, v_words, 4)
    threads, groups = cover(max(k_words, v_words) // width)
    return tuple(_KV_GATHER(
        [slots, keys, values, token],
        {"T": keys.dtype, "K_WORDS": k_words, "V_WORDS": v_words, "W": width, "THREADS": threads},
        (slots.size, groups, 1), threads,
        [(*shape, kv_heads, k_dim), (*shape, kv_heads, v_dim), (1,)],
        [keys.dtype, keys.dtype, mx.float32],
    ))  # fmt: skip


def paged_decode(
    q: "mx.array | NewRows",
    block_tables: mx.array,
    seq_lens: mx.array,
    keys: mx.array,
    values: mx.array,
    token: mx.array,
    *,
    block_size: int,
    scale: float,
    plan: DecodePlan,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    spec: LayerSpec | None = None,
    prefix: "SharedPrefix | None" = None,
) -> tuple[mx.array, mx.array]:
    """Attention of q (B, H, k_head_dim) to seq_lens (B,) keys -> (B, H, v_head_dim), the token.

    q: or rows (B) of which k and v are first written to the last slot of each sequence, by the
    same launch; for a store that is not quantised, and sequences that do not see each other's.
    block_tables: (B, max_blocks).  A seq_len of 0 gives a row of zeros.  plan: see `decode_plan`.
    sinks: (H,).  prefix: of the same q, what is not to be attended to again; not with a window.
    """
    if isinstance(q, mx.array):
        batch, heads, _ = q.shape
        fused, arrays, new = False, [q] * 3 + [no_sinks()] * 3, NONE_NEW
    else:
        batch, heads = len(q.q.array), q.num_heads
        fused, arrays, new = True, q.arrays, q.template(keys, values)
    if prefix and window:
        raise ValueError("a shared prefix with a window")
    dtype = arrays[0].dtype
    k_row, v_row = _rows(keys, values, spec)
    kv_heads, k_dim, v_dim = keys.shape[1], k_row.dim, v_row.dim
    group = heads // kv_heads
    aligned = (_load_words(row) for row in (k_row, v_row))
    lanes, k_width, v_width = _lanes(k_row.value_words, v_row.value_words, *aligned)
    per_lane = max(k_dim, v_dim) // lanes
    tiles = -(-group // max(1, min(group, _REGISTERS // per_lane)))
    at_once = -(-group // tiles)
    splits, simdgroups = plan.splits, plan.simdgroups
    partial = splits > 1
    out_dtype = mx.float32 if partial else dtype
    template = {
        "T": dtype, "OUT_T": out_dtype, "KV_HEADS": kv_heads, "GROUP": group, "HEADS": at_once,
        "FUSED": fused, **new, "PREFIX_SPLITS": 0 if prefix is None else prefix.lse.shape[2],
        **_format(k_row, v_row), "BLOCK_SIZE": block_size, "WINDOW": window or 0,
        "SCALE": bits(scale), "SOFTCAP": bits(softcap or 0.0), "SINKS": sinks is not None,
        "LANES": lanes, "KW": k_width, "VW": v_width,
        "UNROLL": 4 if per_lane <= 12 or k_row.bits else 2, "SIMDGROUPS": simdgroups,
    }  # fmt: skip
    sinks = no_sinks() if sinks is None else sinks.astype(mx.float32)
    shared = prefix or (no_sinks(), no_sinks(), seq_lens)
    out, lse = _PAGED_DECODE(
        [*arrays, block_tables, seq_lens, sinks, *shared, keys, values, token],
        template, (kv_heads * tiles, batch, splits), 32 * simdgroups,
        [(batch, heads, splits, v_dim) if partial else (batch, heads, v_dim),
         (batch, heads, splits)],
        [out_dtype, mx.float32],
    )  # fmt: skip
    if partial:
        out = merge_partitions(out, lse, dtype)
    return out, lse


def merge_partitions(partial: mx.array, lse: mx.array, dtype: mx.Dtype) -> mx.array:
    """Merge attention over splits: partial (B, H, splits, D), lse (B, H, splits) -> (B, H, D)."""
    batch, heads, splits, dim = partial.shape
    threads = min(256, -(-dim // 32) * 32)
    return _MERGE(
        [partial.reshape(-1, splits, dim), lse.reshape(-1, splits)],
        {"T": dtype, "V_DIM": dim, "THREADS": threads, "MAX_SPLITS": MAX_SPLITS},
        (batch * heads, 1, 1), threads,
        [(batch, heads, dim)], [dtype],
    )[0]  # fmt: skip


def _words(elements: int, array: mx.array) -> int:
    """32-bit words of a row."""
    return elements * array.dtype.size // 4


def _rows(keys: mx.array, values: mx.array, spec: LayerSpec | None) -> tuple[RowFormat, RowFormat]:
    if spec:
        return spec.k_row, spec.v_row
    return RowFormat(keys.shape[2], keys.dtype), RowFormat(values.shape[2], values.dtype)


def _format(k_row: RowFormat, v_row: RowFormat) -> Template:
    """What a kernel is told of the rows of a store."""
    return {
        "K_DIM": k_row.dim, "V_DIM": v_row.dim, "BITS": k_row.bits or 8 * k_row.dtype.size,
        "K_GROUP": k_row.group_size, "V_GROUP": v_row.group_size,
    }  # fmt: skip


def _load_words(row: RowFormat) -> int:
    """Most words that a load may take: aligned in every row, and within a group of values."""
    if row.bits is None:
        return 4
    return math.gcd(row.width, row.group_size * row.bits // 32, 4)


def _lanes(
    k_words: int, v_words: int, k_widest: int = 4, v_widest: int = 4
) -> tuple[int, int, int]:
    """Lanes that share a key, and words they load at once of K and of V.

    The widest loads that keep a lane's part of a row short.
    """
    options = []
    for lanes in (32, 16, 8, 4, 2, 1):
        if k_words % lanes or v_words % lanes:
            continue
        widths = [
            math.gcd(words // lanes, widest)
            for words, widest in ((k_words, k_widest), (v_words, v_widest))
        ]
        part = max(k_words, v_words) // lanes
        options.append((part + 8 // min(widths), lanes, *widths))
    return min(options)[1:]


def cover(count: int) -> tuple[int, int]:
    """Threads of a threadgroup (a multiple of 32, at most 256) and threadgroups for `count`."""
    threads = min(256, -(-count // 32) * 32)
    return threads, -(-count // threads)
