"""Origins and rules of a router: scores, choice and weights in one launch of `expert_topk`, however
a model writes them.  A softmax router, the origin of each array, and the launches:

    scores = mx.softmax(logits, axis=-1, precise=True)           RouterScores
    parted = mx.argpartition(scores, kth=-k, axis=-1)            Partition
    inds = parted[..., -k:]                                      Choice           1: experts
    weights = mx.take_along_axis(scores, inds, axis=-1)          RouterWeights    of 1
    sums = weights.sum(axis=-1, keepdims=True)                   Total
    weights /= sums                                              RouterWeights    2: both

The model may use `inds` in any way, so the choice is launched at once.  A rule that adds work to
the weights launches all of it again (`relaunch`), and `inds` becomes a result of this launch too.
Now nothing uses launch 1, so MLX never runs it.
"""

from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.context import fusion_context
from vllm_metal_lite.fusion.norms import add
from vllm_metal_lite.fusion.products import Product
from vllm_metal_lite.fusion.traced import Traced, as_view, origin_of, rows_of
from vllm_metal_lite.kernels.expert_topk import Routing, Scoring, expert_topk, serves
from vllm_metal_lite.model.seam.hooks import Named, modules_of

_COMPILED = type(mx.compile(lambda: None))


@dataclass(frozen=True, slots=True, eq=False)
class RouterScores:
    """Scores of logits (N, experts), in `dtype`.

    bias: (experts,), is added to the scores; the sums have sum_dtype.  negated: the array that the
    model holds is minus the scores, so the best experts come first.
    """

    logits: mx.array
    scoring: Scoring
    dtype: mx.Dtype
    bias: mx.array | None = None
    sum_dtype: mx.Dtype = mx.float32
    negated: bool = False

    @property
    def plain(self) -> bool:
        """Whether nothing was added to the scores, and their sign is their own."""
        return self.bias is None and not self.negated

    @property
    def are_logits(self) -> bool:
        return self.scoring == "logits" and self.plain

    def launch(self, top_k: int, routing: Routing) -> tuple[mx.array, mx.array]:
        """The chosen experts and their weights, each (N, top_k)."""
        return expert_topk(
            self.logits, top_k, routing, dtype=self.dtype, bias=self.bias, sum_dtype=self.sum_dtype
        )


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Indices of scores as `argpartition` orders them: on a GPU, as the kernel does.

    late: the top_k best experts are the last ones; otherwise the first ones.
    """

    scores: RouterScores
    top_k: int
    late: bool


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The chosen experts of rows (N, top_k).  weights: their scores, from the same launch."""

    scores: RouterScores
    top_k: int
    routing: Routing
    weights: mx.array


@dataclass(frozen=True, slots=True, eq=False)
class RouterWeights:
    """Weights of chosen experts.

    indices: the experts, whose origin is a Choice.  routing: all that the weights' launch does.
    """

    indices: Traced
    routing: Routing

    @property
    def are_scores(self) -> bool:
        """Whether the weights are the plain scores of the chosen experts."""
        return (self.routing.weights, self.routing.factor) == ("scores", 1)

    def relaunch(self, value: mx.array, **changes: Any) -> mx.array:
        """`value` from a launch that also does `changes` (fields of Routing).  It chooses the same
        experts in the same order."""
        choice, routing = self.indices.origin, self.routing._replace(**changes)
        if choice is None:  # the model has changed the indices in place
            return value
        indices, weights = choice.scores.launch(choice.top_k, routing)
        self.indices.become(as_view(indices, self.indices.shape[:-1], choice))
        return as_view(weights, value.shape[:-1], RouterWeights(self.indices, routing))


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """The sum of each row's weights, plus eps."""

    weights: RouterWeights
    eps: float = 0.0


def scores_of(x: Any) -> RouterScores | None:
    """Known scores, or a product of a linear layer as logits."""
    origin, rows = origin_of(x), x.rows if type(x) is Traced else None
    if isinstance(origin, RouterScores):
        return origin
    if rows is None or not (origin is None or isinstance(origin, Product)):
        return None
    if "expert_topk" in fusion_context().kernels.unused or not serves(rows, 1):
        return None
    return RouterScores(rows, "logits", x.dtype)


# Rules of scores


def score_by_softmax(value: mx.array, x: mx.array, axis: Any = None, **how: Any) -> mx.array:
    return _scored(value, x, "softmax") if _is_precise(x, axis, **how) else value


def weigh_by_softmax(value: mx.array, x: Traced, axis: Any = None, **how: Any) -> mx.array:
    are_logits = x.origin.are_scores and x.origin.routing.scoring == "logits"
    if not are_logits or not _is_precise(x, axis, **how):
        return value
    return x.origin.relaunch(value, weights="softmax")


def _is_precise(x: mx.array, axis: Any, precise: bool = False, **_: Any) -> bool:
    """Whether a softmax sums the last axis in float32, as the kernel does."""
    return axis in (-1, x.ndim - 1) and (precise or x.dtype == mx.float32)


def score_by_sigmoid(value: mx.array, x: mx.array, **_: Any) -> mx.array:
    return _scored(value, x, "sigmoid")


def _scored(value: mx.array, x: mx.array, scoring: Scoring) -> mx.array:
    logits = scores_of(x)
    if logits is None or not logits.are_logits:
        return value
    return Traced(value, replace(logits, scoring=scoring))


def widen(value: mx.array, x: Traced, dtype: mx.Dtype, *_: Any, **__: Any) -> mx.array:
    """Scores of widened logits are in float32; known scores keep their type."""
    scores = scores_of(x)
    if scores is None or dtype != mx.float32:
        return value
    return Traced(value, replace(scores, dtype=dtype) if scores.are_logits else scores)


def negate(value: mx.array, x: Traced) -> mx.array:
    scores = scores_of(x)
    return value if scores is None else Traced(value, replace(scores, negated=not scores.negated))


def add_bias(value: mx.array, x: Traced, bias: Any) -> mx.array:
    scores = x.origin
    by_expert = isinstance(bias, mx.array) and bias.shape[-1:] == (bias.size,)
    if not by_expert or bias.size != scores.logits.shape[1] or not scores.plain:
        return add(value, x, bias)
    bias = bias if bias.ndim == 1 else bias.reshape(-1)
    return Traced(value, replace(scores, bias=bias, sum_dtype=value.dtype))


# Rules of the choice


def partition(value: mx.array, x: mx.array, kth: int, axis: Any = -1, **_: Any) -> mx.array:
    scores, late = scores_of(x), kth < 0
    # The end that kth cuts off has the lowest scores if it is the last of negated ones, or the
    # first of others.
    if scores is None or axis not in (-1, x.ndim - 1) or late == scores.negated:
        return value
    return Traced(value, Partition(scores, -kth if late else kth + 1, late))


def choose(value: mx.array, x: Traced, key: Any) -> mx.array:
    """The model takes the end of a partition that holds the highest scores."""
    scores, top_k, late = x.origin.scores, x.origin.top_k, x.origin.late
    ends = (slice(-top_k, None),) if late else (slice(None, top_k), slice(0, top_k))
    is_end = type(key) is tuple and len(key) == 2 and key[0] is Ellipsis and key[1] in ends
    if not is_end or not serves(scores.logits, top_k):
        return value
    routing = Routing(scores.scoring, late)
    indices, weights = scores.launch(top_k, routing)
    return as_view(indices, value.shape[:-1], Choice(scores, top_k, routing, weights))


def keep(value: mx.array, x: Traced, **_: Any) -> mx.array:
    """`stop_gradient` changes nothing, since nobody asks for gradients."""
    return x


# Rules of the weights


def gather(value: mx.array, x: mx.array, indices: Any, axis: Any = None, **_: Any) -> mx.array:
    """The weights are the scores of the chosen experts, without the bias, which only chooses."""
    choice, scores = origin_of(indices), scores_of(x)
    if not isinstance(choice, Choice) or scores is None or axis not in (-1, x.ndim - 1):
        return value
    chosen = choice.scores
    same = scores.logits is chosen.logits and scores.scoring == chosen.scoring
    if not same or not scores.plain or not scores.dtype == value.dtype == chosen.dtype:
        return value
    return as_view(choice.weights, value.shape[:-1], RouterWeights(indices, choice.routing))


def total_weights(value: mx.array, x: Traced, axis: Any = None, *args: Any, **how: Any) -> mx.array:
    by_row = axis == -1 and not args and how == {"keepdims": True}
    return Traced(value, Total(x.origin)) if by_row and x.origin.are_scores else value


def add_eps(value: mx.array, x: Traced, eps: Any) -> mx.array:
    number = isinstance(eps, float) and x.origin.eps == 0
    return Traced(value, replace(x.origin, eps=eps)) if number else value


def renormalize(value: mx.array, x: Traced, divisor: Any) -> mx.array:
    total = origin_of(divisor)
    if not isinstance(total, Total) or total.weights is not x.origin:
        return value
    return x.origin.relaunch(value, weights="renormalized", eps=total.eps)


def scale_weights(value: mx.array, x: Traced, factor: Any) -> mx.array:
    if not isinstance(factor, float | int) or x.origin.routing.factor != 1:
        return value
    return x.origin.relaunch(value, factor=float(factor))


# Routers that a model compiles


def compiled_routers(model: nn.Module) -> tuple[Named, ...]:
    """The compiled functions in a model's modules that sort, as those that choose experts do."""
    return tuple(
        (module, name)
        for module in modules_of(model)
        for name, function in vars(module).items()
        if type(function) is _COMPILED and "argpartition" in function.__code__.co_names
    )


def run_uncompiled(original: Any, logits: mx.array, *args: Any, **kwargs: Any) -> Any:
    """The result of `original`.  Runs its Python code, because compiled code keeps no origins; if
    the code chooses no experts, runs `original` itself."""
    code, names, defaults = original.__code__, original.__globals__, original.__defaults__
    uncompiled = FunctionType(code, names, original.__name__, defaults, original.__closure__)
    uncompiled.__kwdefaults__ = original.__kwdefaults__
    result = uncompiled(as_view(rows_of(logits), logits.shape[:-1]), *args, **kwargs)
    chosen = isinstance(result, tuple) and any(isinstance(origin_of(r), Choice) for r in result)
    return result if chosen else original(logits, *args, **kwargs)
