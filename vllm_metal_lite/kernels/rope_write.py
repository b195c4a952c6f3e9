"""Normalises and rotates a layer's queries and keys, and writes keys and values to the paged store,
in one launch."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.launch import Kernel, Template
from vllm_metal_lite.kernels.new_rows import NewRows
from vllm_metal_lite.kernels.store import STORE, TICKET, LayerStore

_ROWS = ("q", "k", "v", "q_weight", "k_weight", "freqs", "positions", "slot_mapping")
_ROPE_WRITE = Kernel("rope_write", [*_ROWS, *STORE], ["out", "next_ticket"])

_SIMDGROUPS = 8
# Heads per simdgroup, one after another, in steps of many rows.
_HEADS = 4


def rope_write(
    rows: NewRows, positions: mx.array, slot_mapping: mx.array, store: LayerStore
) -> tuple[mx.array, mx.array]:
    """Write k and v to their slots -> q (N, num_heads, k_head_dim), the next ticket.

    q, k, v and the values of the store have one floating type.  positions, slot_mapping: (N or
    more,) int32; a negative slot skips the row's k and v.
    """
    count, heads = rows.q.array.shape[0], rows.num_heads
    kv_heads, dtype = store.spec.num_kv_heads, store.spec.dtype
    at_once = _HEADS if count >= profile().rope_many_rows else 1
    groups = -(-(heads + 2 * kv_heads) // (at_once * _SIMDGROUPS))
    template: Template = {"T": dtype, "Q_HEADS": heads, "KV_HEADS": kv_heads}
    template |= store.template | {"SIMDGROUPS": _SIMDGROUPS}
    template |= rows.template(store.spec)
    inputs = [*rows.arrays, positions, slot_mapping, *store.arrays]
    grid, threads = (groups, count, 1), 32 * _SIMDGROUPS
    outputs = [((count, heads, store.spec.k_head_dim), dtype), TICKET]
    q, ticket = _ROPE_WRITE(inputs, template, grid, threads, outputs)
    return q, ticket
