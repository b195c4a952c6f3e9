"""Origins and rules of the weighted sum behind a mixture of experts.

y = switch_mlp(x, indices)          ExpertResults, by `expert_gemm` (layers.py)
y = y * weights[..., None]          Weighted
y = y.sum(axis=-2)                  Summed, by `expert_sum`
y = y.astype(x.dtype)               the same launch rounds
"""

from dataclasses import dataclass
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.traced import Traced, as_view
from vllm_metal_lite.kernels.experts import expert_sum


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
    """One weight for each expert's result; its type may differ."""
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
    """The sums, rounded to `dtype` at the end."""
    rows = expert_sum(weighted.results.rows, weighted.weights, dtype)
    return as_view(rows, weighted.results.shape[:-2], Summed(weighted))
