"""A layer's queries and keys normalised and rotated, keys and values written to the paged store, in
one launch."""

from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import ops
from vllm_metal_lite.kernels.common import norm_dtype, unused
from vllm_metal_lite.kernels.launch import Kernel, Template
from vllm_metal_lite.specs import AttentionShape

_ROPE_WRITE = Kernel(
    "rope_write",
    ["q", "k", "v", "q_weight", "k_weight", "freqs", "positions", "slot_mapping", "keys", "values",
     "token"],
    ["out", "next_token"],
)  # fmt: skip

_SIMDGROUPS = 8
# Heads that a simdgroup takes one after another, and from how many rows on: before, spreading the
# work is worth more than computing a sine once for several heads.
_HEADS, _MANY_ROWS = 4, 256


class Columns(NamedTuple):
    """The heads of q, k or v of N packed rows: columns [start, start + heads * head_dim) of array
    (N, width) or (N, 1, width), row-contiguous.  made: what the array is made of, if known."""

    array: mx.array
    start: int
    made: Any = None


class Rope(NamedTuple):
    """What mx.fast.rope takes.

    dims: leading elements of each head that are rotated, even, at most head_dim.  traditional:
    pairs are (2i, 2i + 1), not (i, i + dims / 2).  The angle of pair i is scale * position * f with
    f = base^(-2i / dims), or 1 / freqs[i] where freqs (dims / 2,) float32 is given instead of base.
    """

    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: mx.array | None


class HeadNorm(NamedTuple):
    """RMS norm over head_dim, before the rotation.  weight: (head_dim,) of any floating type; None
    is ones."""

    weight: mx.array | None
    eps: float


class NewRows(NamedTuple):
    """This step's rows of a layer: queries, keys and values as a product gave them.

    q and k are to be normalised, if they have a norm, then rotated, unless rope is None; k and v
    are to be written to the store.
    """

    q: Columns
    k: Columns
    v: Columns
    num_heads: int
    rope: Rope | None
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None

    @property
    def arrays(self) -> list[mx.array]:
        """What a kernel takes as q, k, v, q_weight, k_weight and freqs."""
        given = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        freqs = None if self.rope is None else self.rope.freqs
        given.append(None if freqs is None else freqs.astype(mx.float32))
        arrays = [self.q.array, self.k.array, self.v.array]
        return arrays + [unused() if a is None else a for a in given]

    def template(self, keys: mx.array, values: mx.array) -> Template:
        """What a kernel is told of them, for a store keys (slots, num_kv_heads, k_head_dim),
        values (.., v_head_dim).

        Raises ValueError if columns lie outside their array or are not of the store's type.
        """
        _, kv_heads, k_dim = keys.shape
        rope = self.rope
        base, freqs = (None, None) if rope is None else (rope.base, rope.freqs)
        template = {
            "DIMS": 0 if rope is None else rope.dims,
            "TRADITIONAL": rope is not None and rope.traditional,
            "ROPE_SCALE": ops.bits(1.0 if rope is None else rope.scale),
            "LOG2_BASE": ops.bits(0.0 if base is None else np.log2(np.float32(base))),
            "FREQS": freqs is not None,
        }
        sizes = self.num_heads * k_dim, kv_heads * k_dim, kv_heads * values.shape[2]
        for name, (array, start, _), size in zip("QKV", self[:3], sizes, strict=True):
            width = array.shape[-1]
            if not 0 <= start <= width - size or array.dtype != keys.dtype:
                raise ValueError(
                    f"{name.lower()} is columns {start} to {start + size} of an array of {width} "
                    f"columns of {array.dtype}, and the store is {keys.dtype}"
                )
            template |= {f"{name}_WIDTH": width, f"{name}_START": start}
        for name, norm in (("Q", self.q_norm), ("K", self.k_norm)):
            weight, eps = norm or (None, 0.0)
            template |= {
                f"{name}_NORM": norm is not None, f"{name}_WEIGHT": weight is not None,
                f"{name}_EPS": ops.bits(eps), f"{name}_R": norm_dtype(keys.dtype, weight),
            }  # fmt: skip
        return template


def unsupported(shape: AttentionShape, rope: Rope | None) -> str | None:
    """Why `rope_write` cannot serve a layer of this shape, or None if it can."""
    if shape.latent:
        return "rope_write has no latent attention"
    if shape.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return f"there are no kernels for {shape.dtype}"
    problem = ops.head_size_problem((shape.k_head_dim, shape.v_head_dim), ops.MAX_DECODE_DIM)
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
    token: mx.array,
) -> tuple[mx.array, mx.array]:
    """Write k and v to their slots -> q (N, num_heads, k_head_dim), the next token.

    q, k, v and the store keys (slots, num_kv_heads, k_head_dim), values (.., v_head_dim) are of one
    floating type.  positions, slot_mapping: (N,) int32; k and v of a row with a negative slot are
    not written.  Raises ValueError if columns lie outside their array or are not of the store's
    type.
    """
    count, heads = rows.q.array.shape[0], rows.num_heads
    _, kv_heads, k_dim = keys.shape
    groups, at_once = _spread(count, heads + 2 * kv_heads)
    template = {
        "T": keys.dtype, "Q_HEADS": heads, "KV_HEADS": kv_heads, "K_DIM": k_dim,
        "V_DIM": values.shape[2], "HEADS": at_once, "SIMDGROUPS": _SIMDGROUPS,
    }  # fmt: skip
    return tuple(_ROPE_WRITE(
        [*rows.arrays, positions, slot_mapping, keys, values, token],
        template | rows.template(keys, values), (groups, count, 1), 32 * _SIMDGROUPS,
        [(count, heads, k_dim), (1,)], [keys.dtype, mx.float32],
    ))  # fmt: skip


def _spread(rows: int, heads: int) -> tuple[int, int]:
    """Threadgroups for the heads of a row, and heads that a simdgroup takes."""
    at_once = _HEADS if rows >= _MANY_ROWS else 1
    return -(-heads // (at_once * _SIMDGROUPS)), at_once
