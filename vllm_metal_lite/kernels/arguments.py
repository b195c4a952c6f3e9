"""Arguments that several kernels take: columns of an array, norms, rotations and scores."""

from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Template, bits


class Columns(NamedTuple):
    """The columns from `start` on of a row-contiguous array (N, width) or (N, 1, width): the heads,
    latents or gates of N packed rows.  origin: the origin of the array (fusion/traced.py), or None.
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


class RMSNorm(NamedTuple):
    """An RMS norm of the last axis, (.., D).  weight: (D,), or None for ones."""

    weight: mx.array | None
    eps: float


def norm_dtype(dtype: mx.Dtype, weight: mx.array | None) -> mx.Dtype:
    """The result type of an RMS norm, as MLX promotes floating types."""
    return dtype if weight is None or weight.dtype == dtype else mx.float32


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
        """The input `freqs` of a kernel."""
        return None if self.freqs is None else self.freqs.astype(mx.float32)

    @property
    def template(self) -> Template:
        """Template values of rope.h."""
        log2_base = 0.0 if self.base is None else np.log2(np.float32(self.base))
        template: Template = {"DIMS": self.dims, "TRADITIONAL": self.traditional}
        template |= {"ROPE_SCALE": bits(self.scale), "LOG2_BASE": bits(log2_base)}
        return template | {"FREQS": self.freqs is not None, "FACTOR": bits(self.factor)}


class Scores(NamedTuple):
    """scale: multiplies the products.  window: tokens that a query sees, including its own.
    softcap: scores become softcap * tanh(score / softcap).  sinks: (H,), one extra softmax logit
    per head, without a value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: mx.array | None = None

    @property
    def template(self) -> Template:
        template: Template = {"WINDOW": self.window or 0, "SCALE": bits(self.scale)}
        return template | {"SOFTCAP": bits(self.softcap or 0.0), "SINKS": self.sinks is not None}

    def sinks_as(self, dtype: mx.Dtype) -> mx.array | None:
        """The input `sinks` of a kernel."""
        return None if self.sinks is None else self.sinks.astype(dtype)
