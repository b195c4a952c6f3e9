"""The origins of traced arrays: parts of a graph that a fused kernel can compute.

    origin                made by                       used by
    Columns, Slice        linear layers, mx.split       Heads, Latents, gates
    Heads                 reshape, rms_norm, rope       rope_write, paged_decode, latent_write
    Latents               mx.split, rms_norm            latent_write
    Scaled                a product with a number       rope
    Attended              attention                     reshape
    Normed                rms_norm                      linear layers, sums, gates
    Multiplied            linear layers                 norms behind a sum, gates, routers
    Activated             gelu                          the product with `up`
    Sum                   x + y                         rms_norm
    Chosen, Weighted      mixtures of experts           products with weights, sums
    Widened, Negated      astype, -x                    routers (routing.py)

The operations of `Traced` and the functions of hooks.py make and use origins.
"""

from dataclasses import dataclass

from vllm_metal_lite.attention.heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.experts import expert_sum
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.skinny_gemm import Gate, skinny_gemm
from vllm_metal_lite.kernels.weights import Weight


class Slice(Columns):
    """Columns of an array that `mx.split` cut."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Scaled:
    """Heads whose first `dims` elements were multiplied by a number."""

    heads: Heads
    factor: float
    dims: int

    def wholly_by(self, factor: float) -> bool:
        """Whether all elements were multiplied by this number."""
        return (self.factor, self.dims) == (factor, self.heads.head_dim)


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention output in its memory layout: rows (N, num_heads, head_dim)."""

    rows: mx.array


@dataclass(frozen=True, slots=True)
class Normed:
    """The RMS norm of rows (N, K), or of each head of x (N, 1, heads, K).

    A product or a residual sum may compute the norm of rows; a gate, that of heads.
    """

    x: mx.array
    norm: RMSNorm


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A `skinny_gemm` product of rows (N, K), or of their norm, and a weight (outputs, K), plus a
    bias (outputs,)."""

    rows: mx.array
    norm: RMSNorm | None
    weight: Weight
    bias: mx.array | None

    def __call__(self, residual: mx.array | None = None, gate: Gate | None = None) -> mx.array:
        """The product (N, outputs), fused with a residual sum or a gate."""
        return skinny_gemm(
            self.rows, self.weight, norm=self.norm, bias=self.bias, residual=residual, gate=gate
        )


@dataclass(frozen=True, slots=True)
class Activated:
    """An activation of some columns of a product."""

    columns: Columns
    activation: Gate


@dataclass(slots=True)
class Sum:
    """x + y.  total: the sum, if a fused kernel already computed it."""

    x: mx.array
    y: mx.array
    total: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Results of each row's experts: rows (N * top_k, K), in the model's shape (.., top_k, K)."""

    rows: mx.array
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weighted:
    """Results of experts times weights (N, top_k).  summed: also summed for each row."""

    experts: Chosen
    weights: mx.array
    summed: bool = False

    def sum(self, dtype: mx.Dtype) -> mx.array:
        """The sums (N, K), rounded to `dtype` at the end."""
        return expert_sum(self.experts.rows, self.weights, dtype)


@dataclass(frozen=True, slots=True)
class Widened:
    """x in float32."""

    x: mx.array


@dataclass(frozen=True, slots=True)
class Negated:
    x: mx.array
