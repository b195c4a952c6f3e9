"""Origins and rules of products by `skinny_gemm`, of gates, and of mixtures of experts.

y = q_proj(x)                       Product (layers.py); a joined projection has Columns of one
y = silu(gate) * up                 the product that made both applies the gate

y = switch_mlp(x, indices)          ExpertResults, by `expert_gemm` (layers.py)
y = y * weights[..., None]          Weighted
y = y.sum(axis=-2)                  Summed, by `expert_sum`
y = y.astype(x.dtype)               the same launch rounds
"""

from dataclasses import dataclass
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.traced import Traced, as_view, origin_of
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm
from vllm_metal_lite.kernels.experts import expert_sum
from vllm_metal_lite.kernels.skinny_gemm import Gate, skinny_gemm
from vllm_metal_lite.kernels.weight_formats import Weight


@dataclass(frozen=True, slots=True)
class Product:
    """A product by `skinny_gemm`: rows (N, K), or their norm, times a weight (outputs, K), plus a
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


# Rules


def apply_gelu(value: mx.array, x: Traced) -> mx.array:
    of_product = isinstance(x.origin.origin, Product)
    return Traced(value, Activated(x.origin, "gelu_approx")) if of_product else value


def apply_gate(value: mx.array, x: Traced, up: Any) -> mx.array:
    return _gated(value, x.origin.columns, origin_of(up), x.origin.activation)


def apply_swiglu(value: mx.array, gate: Traced, up: mx.array) -> mx.array:
    return _gated(value, gate.origin, origin_of(up), "silu")


def _gated(value: mx.array, gate: Columns, up: Any, activation: Gate) -> mx.array:
    """activation(gate) * up from the product that made both."""
    product, size = gate.origin, value.shape[-1]
    if not isinstance(up, Columns) or not isinstance(product, Product):
        return value
    halves = (gate.start, up.start, gate.array.shape[-1]) == (0, size, 2 * size)
    if not halves or gate.array is not up.array:
        return value
    return as_view(product(gate=activation), value.shape[:-1])


@dataclass(frozen=True, slots=True)
class ExpertResults:
    """Results of each row's experts: rows (N * top_k, K), in the model's shape (.., top_k, K)."""

    rows: mx.array
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weighted:
    """Results of experts times weights (N, top_k)."""

    results: ExpertResults
    weights: mx.array


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum of each row's weighted results."""

    weighted: Weighted


# Rules


def weigh(value: mx.array, x: Traced, weights: Any) -> mx.array:
    """The model multiplies each expert's result by a weight, whose type may differ."""
    results = x.origin
    if not isinstance(weights, mx.array) or weights.shape != (*results.shape[:-1], 1):
        return value
    if not mx.issubdtype(weights.dtype, mx.floating):
        return value
    return Traced(value, Weighted(results, weights.reshape(-1, results.shape[-2])))


def sum_up(value: mx.array, x: Traced, axis: Any = None, *args: Any, **how: Any) -> mx.array:
    return value if axis != -2 or args or how else _summed(x.origin, value.dtype)


def round_sum(value: mx.array, x: Traced, dtype: mx.Dtype, *_: Any, **__: Any) -> mx.array:
    weighted = x.origin.weighted
    if dtype == x.dtype:
        return x
    return _summed(weighted, dtype) if dtype == weighted.results.rows.dtype else value


def _summed(weighted: Weighted, dtype: mx.Dtype) -> mx.array:
    """The sums of the weighted results, rounded to `dtype` at the end."""
    rows = expert_sum(weighted.results.rows, weighted.weights, dtype)
    return as_view(rows, weighted.results.shape[:-2], Summed(weighted))
