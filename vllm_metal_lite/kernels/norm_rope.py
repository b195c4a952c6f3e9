"""The norm and the rotation that a kernel can apply to rows."""

from typing import NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Template, bits


class RMSNorm(NamedTuple):
    """An RMS norm of the last axis, (.., D).  weight: (D,); None: ones."""

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
        """The kernel input freqs."""
        return None if self.freqs is None else self.freqs.astype(mx.float32)

    @property
    def template(self) -> Template:
        """Template values of rope.h."""
        log2_base = 0.0 if self.base is None else np.log2(np.float32(self.base))
        template: Template = {"DIMS": self.dims, "TRADITIONAL": self.traditional}
        template |= {"ROPE_SCALE": bits(self.scale), "LOG2_BASE": bits(log2_base)}
        return template | {"FREQS": self.freqs is not None, "FACTOR": bits(self.factor)}
