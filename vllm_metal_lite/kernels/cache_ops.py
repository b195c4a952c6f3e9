"""Writes rows to the store and reads them: kv_write and kv_gather, plain and quantised."""

import math

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Kernel, Template, grid_for
from vllm_metal_lite.kernels.store import STORE, TICKET, LayerStore

_KV_WRITE = Kernel("kv_write", ["k", "v", "slot_mapping", *STORE], ["next_ticket"])
_KV_GATHER = Kernel("kv_gather", ["kv_slots", *STORE], ["k", "v", "next_ticket"])
_KV_WRITE_QUANTISED = Kernel("kv_write_quantised", _KV_WRITE.inputs, _KV_WRITE.outputs)
_KV_GATHER_QUANTISED = Kernel("kv_gather_quantised", _KV_GATHER.inputs, _KV_GATHER.outputs)

# The most heads that a threadgroup quantises: one for each SIMD group.
_SIMDGROUPS = 8


def kv_write(k: mx.array, v: mx.array, slot_mapping: mx.array, store: LayerStore) -> mx.array:
    """Write rows k (N, num_kv_heads, k_head_dim) and v to slots (N or more,).  A negative slot is
    skipped."""
    (rows, kv_heads, _), k_row, v_row = k.shape, store.spec.k_row, store.spec.v_row
    template: Template = {"T": k.dtype, "KV_HEADS": kv_heads}
    if k_row.bits:
        kernel, simdgroups = _KV_WRITE_QUANTISED, min(2 * kv_heads, _SIMDGROUPS)
        threads, groups = 32 * simdgroups, -(-2 * kv_heads // simdgroups)
        template |= {"SIMDGROUPS": simdgroups, **store.template}
    else:
        kernel, words = _KV_WRITE, [kv_heads * row.value_words for row in (k_row, v_row)]
        width = math.gcd(*words, 4)
        threads, groups = grid_for(max(words) // width)
        template |= {"K_DIM": k_row.dim, "V_DIM": v_row.dim, "W": width}
    inputs, grid = [k, v, slot_mapping, *store.arrays], (groups, rows, 1)
    return kernel(inputs, template, grid, threads, [TICKET])[0]


def kv_gather(kv_slots: mx.array, store: LayerStore) -> tuple[mx.array, mx.array, mx.array]:
    """Read slots (N,) from the store -> K and V (num_kv_heads, N, head_dim), the ticket."""
    k_row, v_row = store.spec.k_row, store.spec.v_row
    num_keys, kv_heads, dtype = len(kv_slots), store.spec.num_kv_heads, k_row.dtype
    template: Template = {"T": dtype, "KV_HEADS": kv_heads}
    words, width = (k_row.value_words, v_row.value_words), 1
    if k_row.bits:
        kernel = _KV_GATHER_QUANTISED
        template |= store.template
    else:
        kernel, width = _KV_GATHER, math.gcd(*words, 4)
        template |= {"K_WORDS": words[0], "V_WORDS": words[1], "W": width}
    threads, groups = grid_for(kv_heads * max(words) // width)
    template["THREADS"] = threads
    inputs, grid = [kv_slots, *store.arrays], (num_keys, groups, 1)
    outputs = [((kv_heads, num_keys, row.dim), dtype) for row in (k_row, v_row)]
    k, v, ticket = kernel(inputs, template, grid, threads, [*outputs, TICKET])
    return k, v, ticket
