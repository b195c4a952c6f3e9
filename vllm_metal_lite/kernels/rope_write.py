"""Normalises and rotates a layer's queries and keys, and writes keys and values to the paged store,
in one launch."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import (
    MAX_DECODE_DIM,
    STORE,
    TICKET_SHAPE,
    format_template,
    head_size_problem,
    row_formats,
)
from vllm_metal_lite.kernels.launch import Kernel, Template
from vllm_metal_lite.kernels.new_rows import NewRows, Rope
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.specs import AttentionShape

_ROWS = ("q", "k", "v", "q_weight", "k_weight", "freqs", "positions", "slot_mapping")
_ROPE_WRITE = Kernel("rope_write", [*_ROWS, *STORE], ["out", "next_ticket"])

_SIMDGROUPS = 8
# Heads per simdgroup, one after another, in steps of many rows.
_HEADS = 4


def rope_unsupported(shape: AttentionShape, rope: Rope | None) -> str | None:
    """Why `rope_write` cannot serve a layer of this shape, or None if it can."""
    if shape.latent:
        return "rope_write has no latent attention"
    if shape.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return f"there are no kernels for {shape.dtype}"
    problem = head_size_problem((shape.k_head_dim, shape.v_head_dim), MAX_DECODE_DIM)
    if problem is not None or rope is None:
        return problem
    if rope.dims % 2 or not 2 <= rope.dims <= shape.k_head_dim:
        return f"rotated dims {rope.dims} are not an even number up to head size {shape.k_head_dim}"
    if (rope.base is None) == (rope.freqs is None):
        return "a rotation needs either a base or freqs"
    if rope.freqs is not None and rope.freqs.shape != (rope.dims // 2,):
        return f"freqs have shape {rope.freqs.shape}, not ({rope.dims // 2},)"
    return None


def rope_write(
    rows: NewRows,
    *,
    positions: mx.array,
    slot_mapping: mx.array,
    keys: mx.array,
    values: mx.array,
    ticket: mx.array,
    spec: LayerSpec | None = None,
) -> tuple[mx.array, mx.array]:
    """Write k and v to their slots -> q (N, num_heads, k_head_dim), the next ticket.

    q, k, v and the values of the store have one floating type.  positions, slot_mapping: (N or
    more,) int32; a negative slot skips the row's k and v.  spec: of a quantised store.
    Raises ValueError if columns lie outside their array or do not have the store's type.
    """
    count, heads = rows.q.array.shape[0], rows.num_heads
    kv_heads, (k_row, v_row) = keys.shape[1], row_formats(keys, values, spec)
    at_once = _HEADS if count >= profile().rope_many_rows else 1
    groups = -(-(heads + 2 * kv_heads) // (at_once * _SIMDGROUPS))
    template: Template = {"T": k_row.dtype, "Q_HEADS": heads, "KV_HEADS": kv_heads}
    template |= format_template(k_row, v_row) | {"SIMDGROUPS": _SIMDGROUPS}
    template |= rows.template(kv_heads, k_row, v_row)
    inputs = [*rows.arrays, positions, slot_mapping, keys, values, ticket]
    grid, threads = (groups, count, 1), 32 * _SIMDGROUPS
    shapes, dtypes = [(count, heads, k_row.dim), TICKET_SHAPE], [k_row.dtype, mx.float32]
    q, ticket = _ROPE_WRITE(inputs, template, grid, threads, shapes, dtypes)
    return q, ticket
