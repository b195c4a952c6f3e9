"""The experts of each row, and their weights, from the logits of a router."""

from typing import Literal, NamedTuple, get_args

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Kernel, Template, bits, check_array

_TOPK = Kernel("expert_topk", ["logits", "bias"], ["indices", "weights"])

# Scores of a row lie in the registers of a simdgroup, and so do its choices.
MAX_EXPERTS, MAX_TOP_K = 1024, 32
_PACK = 4

Scoring = Literal["logits", "softmax", "sigmoid"]
Weights = Literal["scores", "renormalized", "softmax"]
# SCORING and WEIGHTS in metal/expert_topk.metal are indices of these.
_SCORINGS, _WEIGHTS = get_args(Scoring), get_args(Weights)


class Routing(NamedTuple):
    """How experts are chosen.

    late: choose the last of an ascending order, as `argpartition(scores, -k)[..., -k:]` does;
    otherwise the first of a descending order.  weights: made from the chosen scores; "renormalized"
    divides them by their sum plus eps.  factor: multiplies all weights.
    """

    scoring: Scoring
    late: bool = False
    weights: Weights = "scores"
    eps: float = 0.0
    factor: float = 1.0


def serves(logits: mx.array, top_k: int) -> bool:
    """Whether `expert_topk` serves logits (rows, experts)."""
    return (
        logits.ndim == 2
        and logits.dtype in (mx.float32, mx.float16, mx.bfloat16)
        and logits.size >= MIN_ELEMENTS
        and logits.shape[1] <= MAX_EXPERTS
        and 1 <= top_k <= min(MAX_TOP_K, logits.shape[1])
    )


def expert_topk(
    logits: mx.array,
    top_k: int,
    routing: Routing,
    *,
    dtype: mx.Dtype | None = None,
    bias: mx.array | None = None,
    sum_dtype: mx.Dtype = mx.float32,
) -> tuple[mx.array, mx.array]:
    """Choose experts: return their indices (rows, top_k) uint32 and weights (rows, top_k).

    logits: (rows, experts), of a shape that `serves` accepts.  dtype: the type of scores and
    weights; by default that of logits.  bias: (experts,); it is added to the scores for the choice
    only, and the sum is rounded to sum_dtype.  metal/expert_topk.metal lists the other roundings.
    """
    rows, experts = logits.shape
    check_array("bias", bias, (experts,))
    dtype = dtype or logits.dtype
    scoring, kind = _SCORINGS.index(routing.scoring), _WEIGHTS.index(routing.weights)
    template: Template = {"W": dtype, "S": sum_dtype, "EXPERTS": experts, "TOP_K": top_k}
    template |= {"PACK": _PACK, "SCORING": scoring, "WEIGHTS": kind, "BIASED": bias is not None}
    template |= {"LATE": routing.late, "EPS": bits(routing.eps), "FACTOR": bits(routing.factor)}
    inputs, grid = [logits, bias], (-(-rows // _PACK), 1, 1)
    outputs = [((rows, top_k), mx.uint32), ((rows, top_k), dtype)]
    indices, weights = _TOPK(inputs, template, grid, 32 * _PACK, outputs)
    return indices, weights
