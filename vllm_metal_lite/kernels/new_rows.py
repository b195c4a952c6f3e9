"""New rows of a layer, as input for kernels that normalise, rotate and write them."""

from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import RMSNorm, bits, norm_dtype
from vllm_metal_lite.kernels.launch import Template
from vllm_metal_lite.kv.store import LayerSpec

# Template values that disable the fused inputs.
_NONE_NEW: Template = {
    **dict.fromkeys(("DIMS", "TRADITIONAL", "ROPE_SCALE", "LOG2_BASE", "FREQS", "FACTOR"), 0),
    **{f"{x}_{of}": 0 for x in "QKV" for of in ("WIDTH", "START")},
    **{f"{x}_{of}": 0 for x in "QK" for of in ("NORM", "WEIGHT", "EPS")},
    "Q_R": mx.float32,
    "K_R": mx.float32,
}


class Columns(NamedTuple):
    """The columns from `start` on of an array (N, width) or (N, 1, width), row-contiguous: heads,
    latents or gates of N packed rows.  origin: of the array (fusion/traced.py), if known.
    """

    array: mx.array
    start: int
    origin: Any = None


def columns_template(
    name: str, columns: Columns, rows: int, size: int, dtype: mx.Dtype
) -> Template:
    """Template values for `size` columns of the input `name`: NAME_WIDTH and NAME_START.

    Raises ValueError if the columns lie outside their array, which has `rows` rows of dtype.
    """
    (array, start, _), width = columns, columns.array.shape[-1]
    if not 0 <= start <= width - size or len(array) != rows or array.dtype != dtype:
        raise ValueError(
            f"{name} is columns {start} to {start + size} of {rows} rows of {dtype}, "
            f"but its array is {array.shape} {array.dtype}"
        )
    return {f"{name.upper()}_WIDTH": width, f"{name.upper()}_START": start}


class Rope(NamedTuple):
    """The arguments of mx.fast.rope, and the factor of its input.

    dims: leading elements of each head that are rotated, even, at most head_dim.  traditional:
    pairs are (2i, 2i + 1), not (i, i + dims / 2).  The angle of pair i is scale * position * f with
    f = base^(-2i / dims), or 1 / freqs[i] where freqs (dims / 2,) float32 is given instead of base.
    factor: multiplies these elements before the rotation (YaRN, LongRoPE).  Factor and products are
    rounded to the type of x, as MLX rounds them.
    """

    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: mx.array | None
    factor: float = 1.0

    @property
    def frequencies(self) -> mx.array | None:
        """The kernel input freqs."""
        return None if self.freqs is None else self.freqs.astype(mx.float32)

    @property
    def template(self) -> Template:
        """Template values of rope.h."""
        log2_base = 0.0 if self.base is None else np.log2(np.float32(self.base))
        template: Template = {"DIMS": self.dims, "TRADITIONAL": self.traditional}
        template |= {"ROPE_SCALE": bits(self.scale), "LOG2_BASE": bits(log2_base)}
        return template | {"FREQS": self.freqs is not None, "FACTOR": bits(self.factor)}


# Template values of rows that are not rotated.
_STILL = Rope(0, False, None, 1.0, None).template


class NewRows(NamedTuple):
    """This step's rows of a layer: queries, keys and values as a product returned them.

    A kernel normalises q and k if they have a norm, rotates them unless rope is None, and writes k
    and v to the store.
    """

    q: Columns
    k: Columns
    v: Columns
    num_heads: int
    rope: Rope | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    @property
    def arrays(self) -> list[mx.array | None]:
        """The kernel inputs q, k, v, q_weight, k_weight and freqs."""
        weights = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        freqs = None if self.rope is None else self.rope.frequencies
        return [self.q.array, self.k.array, self.v.array, *weights, freqs]

    def template(self, spec: LayerSpec) -> Template:
        """Template values for a store of this layer."""
        k_dim, dtype, rows = spec.k_head_dim, spec.dtype, len(self.q.array)
        template = dict(_STILL if self.rope is None else self.rope.template)
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
    return rows, heads, [q, q, q, None, None, None], {"FUSED": False, **_NONE_NEW}
