"""A router's scores, choice and weights in one launch of `expert_topk`, however a model writes it:

    scores = mx.softmax(logits, axis=-1, precise=True)           RouterScores
    inds = mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]    Partition, then Choice
    weights = mx.take_along_axis(scores, inds, axis=-1)          Gathered
    weights /= weights.sum(axis=-1, keepdims=True)               Gathered, of Total

The methods `on_...` of these origins return the result of an operation on them (traced.py).  When
the model cuts out the indices, they come from a launch of the kernel, so any later operation is
right.  Each known operation replaces that launch by one that does more of the work.  MLX never runs
a launch whose results are unused.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.origins import Multiplied, Negated, Widened
from vllm_metal_lite.fusion.traced import Function, Traced, as_view, origin_of, rows_of
from vllm_metal_lite.kernels.expert_topk import Routing, Scoring, expert_topk, fits
from vllm_metal_lite.model.seam.hooks import Hook, modules_of

_COMPILED = type(mx.compile(lambda: None))

# A module of a model, and the name of a compiled function in it.
Selector = tuple[ModuleType, str]


@dataclass(frozen=True, slots=True, eq=False)
class RouterScores:
    """Scores of logits (N, experts), in `dtype`.  bias: (experts,), added to them, in sum_dtype."""

    logits: mx.array
    scoring: Scoring
    dtype: mx.Dtype
    bias: mx.array | None = None
    sum_dtype: mx.Dtype = mx.float32
    negated: bool = False

    def on_add(self, value: mx.array, other: Any) -> mx.array:
        biases = isinstance(other, mx.array) and other.shape[-1:] == (other.size,)
        if not biases or other.size != self.logits.shape[1] or self.biased or self.negated:
            return value
        bias = other if other.ndim == 1 else other.reshape(-1)
        return Traced(value, replace(self, bias=bias, sum_dtype=value.dtype))

    def on_widen(self, value: mx.array) -> mx.array:
        """Scores of widened logits are in float32; known scores keep their type."""
        return Traced(value, replace(self, dtype=mx.float32) if self.are_logits else self)

    @property
    def biased(self) -> bool:
        return self.bias is not None

    @property
    def are_logits(self) -> bool:
        """Whether these are plain logits."""
        return self.scoring == "logits" and not self.negated and not self.biased

    def weighs(self, choice: "Choice") -> bool:
        """Whether these are the scores of a choice, without the bias that only chooses."""
        of = choice.scores
        same = self.logits is of.logits and (self.scoring, self.dtype) == (of.scoring, of.dtype)
        return same and not self.biased and not self.negated


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Indices of scores as `argpartition` orders them: on a GPU, as the kernel does."""

    scores: RouterScores
    kth: int

    def on_getitem(self, value: mx.array, key: Any) -> mx.array:
        """The end that holds the highest scores."""
        late = not self.scores.negated
        top_k = -self.kth if late else self.kth + 1
        end = (slice(-top_k, None),) if late else (slice(None, top_k), slice(0, top_k))
        whole = type(key) is tuple and len(key) == 2 and key[0] is Ellipsis and key[1] in end
        if not whole or not fits(self.scores.logits, top_k):
            return value
        choice = Choice(self.scores, top_k, late)
        return as_view(choice.indices, value.shape[:-1], choice)


class Choice:
    """The chosen experts of rows, with their scores as weights.

    indices: (N, top_k), of the latest launch, which chooses the same experts in the same order.
    """

    def __init__(self, scores: RouterScores, top_k: int, late: bool) -> None:
        self.scores, self.top_k = scores, top_k
        self.routing = Routing(scores.scoring, late)
        self.indices, self.weights = self._launched(self.routing)

    def weighted(self, routing: Routing, value: mx.array) -> mx.array:
        """Weights in the shape of `value`, in a launch that replaces the others."""
        self.indices, weights = self._launched(routing)
        return as_view(weights, value.shape[:-1], Gathered(self, routing))

    def _launched(self, routing: Routing) -> tuple[mx.array, mx.array]:
        of = self.scores
        return expert_topk(
            of.logits, self.top_k, routing, dtype=of.dtype, bias=of.bias, sum_dtype=of.sum_dtype
        )


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """Weights of a choice."""

    choice: Choice
    routing: Routing

    def on_sum(self, value: mx.array) -> mx.array:
        return Traced(value, Total(self)) if self._plain else value

    def on_div(self, value: mx.array, other: Any) -> mx.array:
        total = origin_of(other)
        if not isinstance(total, Total) or total.weights is not self:
            return value
        routing = self.routing._replace(weights="renormalized", eps=total.eps)
        return self.choice.weighted(routing, value)

    def on_mul(self, value: mx.array, other: Any) -> mx.array:
        if not isinstance(other, float | int) or self.routing.factor != 1:
            return value
        return self.choice.weighted(self.routing._replace(factor=float(other)), value)

    def on_softmax(self, value: mx.array) -> mx.array:
        if not self._plain or self.routing.scoring != "logits":
            return value
        return self.choice.weighted(self.routing._replace(weights="softmax"), value)

    @property
    def _plain(self) -> bool:
        """Whether these are scores, and nothing else yet."""
        return (self.routing.weights, self.routing.factor) == ("scores", 1)


@dataclass(frozen=True, slots=True, eq=False)
class Total:
    """The sum of each row's weights, plus eps."""

    weights: Gathered
    eps: float = 0.0

    def on_add(self, value: mx.array, other: Any) -> mx.array:
        number = isinstance(other, float) and self.eps == 0
        return Traced(value, replace(self, eps=other)) if number else value


def latest(indices: mx.array) -> mx.array:
    """The chosen experts (.., top_k), from the same launch as their weights."""
    origin = origin_of(indices)
    return as_view(origin.indices, indices.shape[:-1]) if isinstance(origin, Choice) else indices


def scores_of(x: Any) -> RouterScores | None:
    """Known scores, or a product of a linear layer as logits."""
    origin = origin_of(x)
    if isinstance(origin, RouterScores):
        return origin
    if isinstance(origin, Negated):
        scores = scores_of(origin.x)
        return None if scores is None else replace(scores, negated=not scores.negated)
    if isinstance(origin, Widened):
        scores = scores_of(origin.x)
        return scores and replace(scores, dtype=x.dtype)
    product = origin is None or isinstance(origin, Multiplied)
    if type(x) is not Traced or x.rows is None or not product or not fits(x.rows, 1):
        return None
    return RouterScores(x.rows, "logits", x.dtype)


# The functions


def routing_functions(selectors: Collection[Selector]) -> list[Hook]:
    """MLX's functions, and a model's compiled ones, that record scores and choices."""
    hooks: list[Hook] = [
        (mx, name, partial(record, getattr(mx, name))) for name, record in _RECORDING.items()
    ]
    return hooks + [(m, name, _selecting(getattr(m, name))) for m, name in selectors]


def _softmax(original: Function, x: mx.array, axis: Any = None, **kwargs: Any) -> mx.array:
    value = original(x, axis, **kwargs)
    if type(x) is not Traced or axis not in (-1, x.ndim - 1):
        return value
    # MLX's softmax of 16 bits sums in 16 bits.
    if not kwargs.get("precise") and x.dtype != mx.float32:
        return value
    if isinstance(x.origin, Gathered):
        return x.origin.on_softmax(value)
    return _scored(value, x, "softmax")


def _sigmoid(original: Function, x: mx.array, **kwargs: Any) -> mx.array:
    return _scored(original(x, **kwargs), x, "sigmoid")


def _scored(value: mx.array, x: mx.array, scoring: Scoring) -> mx.array:
    logits = scores_of(x)
    if logits is None or not logits.are_logits:
        return value
    return Traced(value, replace(logits, scoring=scoring))


def _argpartition(
    original: Function, x: mx.array, kth: int, axis: Any = -1, **kwargs: Any
) -> mx.array:
    value, scores = original(x, kth, axis, **kwargs), scores_of(x)
    # A kth from the other end cuts out the lowest scores.
    if scores is None or axis not in (-1, x.ndim - 1) or (kth >= 0) != scores.negated:
        return value
    return Traced(value, Partition(scores, kth))


def _take_along_axis(
    original: Function, x: mx.array, indices: mx.array, axis: Any, **kwargs: Any
) -> mx.array:
    value, choice = original(x, indices, axis, **kwargs), origin_of(indices)
    if not isinstance(choice, Choice) or axis not in (-1, x.ndim - 1):
        return value
    scores = scores_of(x)
    weighs = scores is not None and scores.weighs(choice) and scores.dtype == value.dtype
    if not weighs:
        return value
    return as_view(choice.weights, value.shape[:-1], Gathered(choice, choice.routing))


def _stop_gradient(original: Function, x: mx.array, **kwargs: Any) -> mx.array:
    known = isinstance(origin_of(x), Partition | Choice)
    return x if known else original(x, **kwargs)


def _sum(original: Function, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    if isinstance(origin_of(x), Gathered):
        return x.sum(*args, **kwargs)
    return original(x, *args, **kwargs)


_RECORDING: dict[str, Function] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "argpartition": _argpartition,
    "take_along_axis": _take_along_axis,
    "stop_gradient": _stop_gradient,
    "sum": _sum,
}


# Compiled functions


def selectors_of(model: nn.Module) -> tuple[Selector, ...]:
    """The compiled functions in a model's modules that sort, as those that choose experts do."""
    return tuple(
        (module, name)
        for module in modules_of(model)
        for name, function in vars(module).items()
        if type(function) is _COMPILED and "argpartition" in function.__code__.co_names
    )


def _selecting(original: Any) -> Function:
    """Run the function uncompiled, because compiled code has no origins.  If it then chooses no
    experts, run it compiled."""
    code, names, defaults = original.__code__, original.__globals__, original.__defaults__
    plain = FunctionType(code, names, original.__name__, defaults, original.__closure__)
    plain.__kwdefaults__ = original.__kwdefaults__

    def select(logits: mx.array, *args: Any, **kwargs: Any) -> Any:
        result = plain(as_view(rows_of(logits), logits.shape[:-1]), *args, **kwargs)
        chosen = isinstance(result, tuple) and any(isinstance(origin_of(r), Choice) for r in result)
        return result if chosen else original(logits, *args, **kwargs)

    return select
