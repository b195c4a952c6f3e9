"""Normalises a layer's latents, rotates its rotary keys and queries, and writes to the paged store,
in one launch."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope, columns_template, norm_dtype
from vllm_metal_lite.kernels.launch import Kernel, Template, bits
from vllm_metal_lite.kernels.store import STORE, TICKET, LayerStore

_ROWS = ("q", "latent", "k_pe", "weight", "freqs", "positions", "slot_mapping")
_LATENT_WRITE = Kernel("latent_write", [*_ROWS, *STORE], ["out", "next_ticket"])

_SIMDGROUPS = 8


class NewLatents(NamedTuple):
    """This step's rows of a latent layer, as products returned them.

    q: starts at the first head's rotary part; heads are `stride` columns apart.  latent, k_pe: the
    columns of latents and rotary keys.  norm: normalises the latents, and has a weight.  rope:
    rotates the rotary parts.  positions: (N or more,) int32, the position by which each of
    the N rows rotates.
    """

    q: Columns
    stride: int
    num_heads: int
    latent: Columns
    k_pe: Columns
    norm: RMSNorm
    rope: Rope
    positions: mx.array


def latent_write(
    rows: NewLatents, slot_mapping: mx.array, store: LayerStore
) -> tuple[mx.array, mx.array]:
    """Write latents and rotary keys to their slots -> rotary queries (N, num_heads, rope), the next
    ticket.

    slot_mapping: (N or more,) int32; a negative slot writes nothing.
    """
    spec, rope, weight = store.spec, rows.rope, rows.norm.weight
    dtype, latent_dim, rope_dim = spec.dtype, spec.k_head_dim, spec.v_head_dim
    assert weight is not None, "latents are normalised with a weight"
    count, heads = len(rows.q.array), rows.num_heads
    template: Template = {"T": dtype, "R": norm_dtype(dtype, weight), "HEADS": heads}
    template |= {"LATENT_DIM": latent_dim, "ROPE": rope_dim, **store.formats}
    template |= {"Q_STRIDE": rows.stride, "EPS": bits(rows.norm.eps), **rope.template}
    template |= {"SIMDGROUPS": _SIMDGROUPS}
    template |= columns_template("q", rows.q, count, (heads - 1) * rows.stride + rope_dim, dtype)
    template |= columns_template("l", rows.latent, count, latent_dim, dtype)
    template |= columns_template("p", rows.k_pe, count, rope_dim, dtype)
    inputs = [rows.q.array, rows.latent.array, rows.k_pe.array, weight, rope.frequencies]
    inputs += [rows.positions, slot_mapping, *store.arrays]
    grid = -(-(heads + 2) // _SIMDGROUPS), count, 1
    outputs = [((count, heads, rope_dim), dtype), TICKET]
    out, ticket = _LATENT_WRITE(inputs, template, grid, 32 * _SIMDGROUPS, outputs)
    return out, ticket
