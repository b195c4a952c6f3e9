"""Normalises and rotates a layer's queries and keys, and writes keys and values to the paged store,
in one launch.

NewRows are the input of each kernel that does this, so also of `fused_decode`.
"""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope, columns_template, norm_dtype
from vllm_metal_lite.kernels.launch import Kernel, Template, bits
from vllm_metal_lite.kernels.store import STORE, TICKET, LayerStore
from vllm_metal_lite.kv.store import LayerSpec

# The inputs of new rows (`NewRows.arrays`).
ROWS = ("q", "k", "v", "q_weight", "k_weight", "freqs", "positions")
# The template values of rows without a rotation.
_NO_ROPE = Rope(0, False, None, 1.0, None).template
# The template values that disable the inputs of new rows.
_NO_NEW_ROWS: Template = {
    **_NO_ROPE,
    **{f"{x}_{of}": 0 for x in "QKV" for of in ("WIDTH", "START")},
    **{f"{x}_{of}": 0 for x in "QK" for of in ("NORM", "WEIGHT", "EPS")},
    "Q_R": mx.float32,
    "K_R": mx.float32,
}


class NewRows(NamedTuple):
    """This step's rows of a layer: queries, keys and values as a product returned them.

    A kernel normalises q and k if they have a norm, rotates them unless rope is None, and writes k
    and v to the store.
    positions: (N or more,) int32, the position by which each of the N rows rotates.
    """

    q: Columns
    k: Columns
    v: Columns
    num_heads: int
    rope: Rope | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    positions: mx.array

    @property
    def arrays(self) -> list[mx.array | None]:
        """The kernel inputs q, k, v, q_weight, k_weight, freqs and positions."""
        weights = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        freqs = None if self.rope is None else self.rope.frequencies
        return [self.q.array, self.k.array, self.v.array, *weights, freqs, self.positions]

    def template(self, spec: LayerSpec) -> Template:
        """Template values for a store of this layer."""
        k_dim, dtype, rows = spec.k_head_dim, spec.dtype, len(self.q.array)
        template = dict(_NO_ROPE if self.rope is None else self.rope.template)
        kv_heads = spec.num_kv_heads
        sizes = self.num_heads * k_dim, kv_heads * k_dim, kv_heads * spec.v_head_dim
        for name, columns, size in zip("qkv", (self.q, self.k, self.v), sizes, strict=True):
            template |= columns_template(name, columns, rows, size, dtype)
        for name, norm in (("Q", self.q_norm), ("K", self.k_norm)):
            weight, eps = norm or (None, 0.0)
            template[f"{name}_NORM"] = norm is not None
            template[f"{name}_WEIGHT"] = weight is not None
            template |= {f"{name}_EPS": bits(eps), f"{name}_R": norm_dtype(dtype, weight)}
        return template


def query_inputs(
    q: mx.array | NewRows, spec: LayerSpec
) -> tuple[int, int, list[mx.array | None], Template]:
    """Rows and heads of q, `NewRows.arrays`, and its template values, FUSED included.

    q: queries (B, H, k_head_dim), which stand in for keys and values; or new rows.
    """
    if isinstance(q, NewRows):
        return len(q.q.array), q.num_heads, q.arrays, {"FUSED": True, **q.template(spec)}
    rows, heads, _ = q.shape
    return rows, heads, [q, q, q, None, None, None, None], {"FUSED": False, **_NO_NEW_ROWS}


_ROPE_WRITE = Kernel("rope_write", [*ROWS, "slot_mapping", *STORE], ["out", "next_ticket"])

_SIMDGROUPS = 8
# How many heads a SIMD group serves, one after another, in steps of many rows.
_HEADS = 4


def rope_write(
    rows: NewRows, slot_mapping: mx.array, store: LayerStore
) -> tuple[mx.array, mx.array]:
    """Write k and v to their slots -> q (N, num_heads, k_head_dim), the next ticket.

    q, k, v and the values of the store have one floating type.  slot_mapping: (N or more,)
    int32; a negative slot skips the row's k and v.
    """
    count, heads = rows.q.array.shape[0], rows.num_heads
    kv_heads, dtype = store.spec.num_kv_heads, store.spec.dtype
    at_once = _HEADS if count >= profile().rope_many_rows else 1
    groups = -(-(heads + 2 * kv_heads) // (at_once * _SIMDGROUPS))
    template: Template = {"T": dtype, "Q_HEADS": heads, "KV_HEADS": kv_heads}
    template |= store.template | {"SIMDGROUPS": _SIMDGROUPS}
    template |= rows.template(store.spec)
    inputs = [*rows.arrays, slot_mapping, *store.arrays]
    grid, threads = (groups, count, 1), 32 * _SIMDGROUPS
    outputs = [((count, heads, store.spec.k_head_dim), dtype), TICKET]
    q, ticket = _ROPE_WRITE(inputs, template, grid, threads, outputs)
    return q, ticket
