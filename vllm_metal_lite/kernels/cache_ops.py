"""Writes rows to the store and reads them: kv_write and kv_gather, plain and quantised."""

import math

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import STORE, TICKET_SHAPE, format_template, grid_for
from vllm_metal_lite.kernels.launch import Kernel, Template
from vllm_metal_lite.kv.store import LayerSpec

_KV_WRITE = Kernel("kv_write", ["k", "v", "slot_mapping", *STORE], ["next_ticket"])
_KV_GATHER = Kernel("kv_gather", ["kv_slots", *STORE], ["k", "v", "next_ticket"])
_KV_WRITE_QUANTISED = Kernel("kv_write_quantised", _KV_WRITE.inputs, _KV_WRITE.outputs)
_KV_GATHER_QUANTISED = Kernel("kv_gather_quantised", _KV_GATHER.inputs, _KV_GATHER.outputs)

# Heads of K or V that a threadgroup quantises.
_SIMDGROUPS = 8


def kv_write(
    k: mx.array,
    v: mx.array,
    slot_mapping: mx.array,
    keys: mx.array,
    values: mx.array,
    ticket: mx.array,
    spec: LayerSpec | None = None,
) -> mx.array:
    """Write rows k (N, num_kv_heads, k_head_dim) and v to slots (N or more,).  A negative slot is
    skipped."""
    rows, kv_heads, k_dim = k.shape
    arrays = [k, v, slot_mapping, keys, values, ticket]
    if spec and spec.bits:
        simdgroups = min(2 * kv_heads, _SIMDGROUPS)
        template: Template = {"T": k.dtype, "KV_HEADS": kv_heads, "SIMDGROUPS": simdgroups}
        template |= format_template(spec.k_row, spec.v_row)
        grid = -(-2 * kv_heads // simdgroups), rows, 1
        threads, shapes = 32 * simdgroups, [TICKET_SHAPE]
        return _KV_WRITE_QUANTISED(arrays, template, grid, threads, shapes, [mx.float32])[0]
    k_words, v_words = _words(kv_heads * k_dim, k), _words(kv_heads * v.shape[2], v)
    width = math.gcd(k_words, v_words, 4)
    threads, groups = grid_for(max(k_words, v_words) // width)
    template = {"T": k.dtype, "KV_HEADS": kv_heads, "K_DIM": k_dim, "V_DIM": v.shape[2], "W": width}
    return _KV_WRITE(arrays, template, (groups, rows, 1), threads, [TICKET_SHAPE], [mx.float32])[0]


def kv_gather(
    kv_slots: mx.array,
    keys: mx.array,
    values: mx.array,
    ticket: mx.array,
    spec: LayerSpec | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Read slots (N,) from the store -> K and V (num_kv_heads, N, head_dim), the ticket."""
    num_keys, arrays = len(kv_slots), [kv_slots, keys, values, ticket]
    if spec and spec.bits:
        heads, k_row, v_row = spec.num_kv_heads, spec.k_row, spec.v_row
        threads, groups = grid_for(heads * max(k_row.value_words, v_row.value_words))
        template: Template = {"T": spec.dtype, "KV_HEADS": heads, "THREADS": threads}
        template |= format_template(k_row, v_row)
        shapes = [(heads, num_keys, row.dim) for row in (k_row, v_row)] + [TICKET_SHAPE]
        dtypes = [spec.dtype, spec.dtype, mx.float32]
        grid = num_keys, groups, 1
        k, v, ticket = _KV_GATHER_QUANTISED(arrays, template, grid, threads, shapes, dtypes)
        return k, v, ticket
    _, kv_heads, k_dim = keys.shape
    v_dim = values.shape[2]
    k_words, v_words = _words(k_dim, keys), _words(v_dim, values)
    width = math.gcd(k_words, v_words, 4)
    threads, groups = grid_for(kv_heads * max(k_words, v_words) // width)
    template = {"T": keys.dtype, "KV_HEADS": kv_heads, "K_WORDS": k_words, "V_WORDS": v_words}
    template |= {"W": width, "THREADS": threads}
    shapes = [(kv_heads, num_keys, k_dim), (kv_heads, num_keys, v_dim), TICKET_SHAPE]
    dtypes = [keys.dtype, keys.dtype, mx.float32]
    k, v, ticket = _KV_GATHER(arrays, template, (num_keys, groups, 1), threads, shapes, dtypes)
    return k, v, ticket


def _words(elements: int, array: mx.array) -> int:
    """32-bit words of a row."""
    return elements * array.dtype.size // 4
