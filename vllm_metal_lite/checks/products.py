"""The kernels that fuse norms, sums and activations with products, and mixtures of experts: when a
model uses them, their checks, and their timing.

The reference is computed in NumPy on this machine's CPU, rounded where MLX's own norm rounds.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.check import (
    Check,
    Loads,
    MixtureShape,
    NormShape,
    Pair,
    ProductShape,
)
from vllm_metal_lite.checks.values import (
    EPS,
    ROWS,
    TOLERANCE,
    activated,
    draw,
    draw_weight,
    largest,
    largest_error,
    rms_norm,
    rounded,
)
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.expert_topk import Routing, expert_topk
from vllm_metal_lite.kernels.experts import (
    Activation,
    ExpertPlan,
    ExpertWeight,
    expert_product,
    expert_sum,
    most_tiles,
    plan_experts,
)
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS
from vllm_metal_lite.kernels.skinny_gemm import (
    MAX_LANE_ROWS,
    MAX_ROWS,
    gemm_plan,
    multiplies_in_lanes,
    skinny_gemm,
)
from vllm_metal_lite.specs import KernelUse, Quantisation, WeightShape

# Rows of a product that do not fill a tile.
_FEW_ROWS = 5
# Rows that are multiplied with quantised weights without instructions for matrices.  One row has a
# kernel source of its own; 2 to 4 share one.  The bias and GeGLU come behind the sums, where all
# rows share the source.
_LANE_ROWS = (1, 3)
_MOST_OUTPUTS = 256


def checks(use: KernelUse) -> list[Check]:
    dtype = next((shape.dtype for shape in (*use.shapes, *use.recurrences)), mx.float32)
    checks: list[Check] = [
        Check("add_rms_norm", NormShape(size, dtype)) for size in use.hidden_sizes
    ]
    if dtype != mx.float32:
        checks += _products(use.weights, dtype)
        kernels = "expert_topk", "expert_plan", "expert_gemm", "expert_sum"
        mixtures = [MixtureShape(experts, dtype) for experts in use.experts]
        checks += [Check(kernel, mixture) for mixture in mixtures for kernel in kernels]
    return checks


def _products(weights: Sequence[WeightShape], dtype: mx.Dtype) -> list[Check]:
    """Each quantisation at its least and its greatest depth."""
    checks: list[Check] = []
    for how in dict.fromkeys(weight.quantisation for weight in weights):
        by_depth = sorted((w for w in weights if w.quantisation == how), key=lambda w: w.depth)
        ends = by_depth[0], by_depth[-1]
        products = [(_FEW_ROWS, ends[0], False), (MAX_ROWS, ends[1], True)]
        if multiplies_in_lanes(1, ends[0]):
            most = profile().max_lane_rows
            lanes = zip(_LANE_ROWS, ends, strict=True)
            products += [(min(rows, most), weight, False) for rows, weight in lanes]
        checks += [
            Check("skinny_gemm", ProductShape(rows, weight, dtype, biased))
            for rows, weight, biased in products
        ]
    return checks


def add_norm(check: Check[NormShape]) -> float:
    """Rows of the model's hidden size, with and without a norm of one summand."""
    (dim, dtype), rng = check.shape, np.random.default_rng(0)
    x, y = (draw(rng, (ROWS, dim), dtype) for _ in range(2))
    weight = draw(rng, (dim,), dtype)
    a, b, gain = (mx.array(array).astype(dtype) for array in (x, y, weight))
    error = 0.0
    for norm in (None, RMSNorm(gain, EPS)):
        added = rounded(x + (y if norm is None else rms_norm(y, weight, EPS, dtype)), dtype)
        got = add_rms_norm(a, b, gain, EPS, norm)
        expected = added, rms_norm(added, weight, EPS, dtype)
        error = max(error, largest(got, expected, TOLERANCE[dtype]))
    return error


def timed_add_norm(check: Check[NormShape], loads: Loads) -> list[Pair]:
    size, dtype = check.shape
    x, weight = mx.random.normal((loads.rows, size)).astype(dtype), mx.ones(size, dtype)
    mx.eval(x, weight)

    def unfused() -> object:
        added = x + x
        return added, mx.fast.rms_norm(added, weight, EPS)

    return [(lambda: add_rms_norm(x, x, weight, EPS), unfused)]


def product(check: Check[ProductShape]) -> float:
    """The plan is that of the weight's own number of outputs; the product has fewer."""
    rows, shape, dtype, biased = check.shape
    outputs, depth, how = shape
    width, rng = min(outputs, _MOST_OUTPUTS) // 2 * 2, np.random.default_rng(0)
    x = draw(rng, (rows, depth), dtype) / 2  # otherwise rounding errors of gate and up add up
    plan = gemm_plan(rows, shape)
    w, weight = draw_weight(rng, (width, depth), dtype, how)
    a = mx.array(x).astype(dtype)
    gate_columns = weight[: width // 2].T, weight[width // 2 :].T
    if biased:
        bias = draw(rng, (width,), dtype) / 2
        halves = zip(gate_columns, np.split(bias, 2), strict=True)
        gate, up = (x @ columns + b for columns, b in halves)
        fused = skinny_gemm(a, w, plan=plan, bias=mx.array(bias).astype(dtype), gate="gelu_approx")
        return largest_error(fused, activated(gate, up, Activation("geglu")), TOLERANCE[dtype])
    residual = draw(rng, (rows, width // 2), dtype)
    gain = draw(rng, (depth,), dtype) / 2
    normed = rms_norm(x, gain, EPS, dtype)
    gate, up = (normed @ columns for columns in gate_columns)
    r, g = (mx.array(array).astype(dtype) for array in (residual, gain))
    fused = skinny_gemm(a, w, plan=plan, norm=RMSNorm(g, EPS), residual=r, gate="silu")
    expected = activated(gate, up, Activation()) + residual
    return largest_error(fused, expected, TOLERANCE[dtype])


_ROWS, _MANY_ROWS, _CHOICES = 20, 300, 4
_PADDING = 2  # the number of last rows that are padding
# The pairs of a tile: many, and so few that no matrix instruction multiplies them.
_TILES = 32, MAX_LANE_ROWS
# Fewer experts and columns than the model has, but its depth: the kernel's text is the same.
_EXPERTS, _OUTPUTS = 5, 200
_CLAMPED = Activation("clamped_swiglu", 1.702, 7.0)
_MOST_CHOSEN = 8
_ROUTINGS = (
    Routing("softmax", late=True, weights="renormalized"),
    Routing("sigmoid", weights="renormalized", eps=1e-2, factor=2.5),
    Routing("logits", late=True, weights="softmax"),
)


def expert_plan(check: Check[MixtureShape]) -> float:
    """Plans, equal to the bit, with padding and one expert that has several tiles.  For few rows,
    for more than threadgroup memory holds at once, and for few pairs: a short array."""
    count, got, expected = check.shape.experts.experts, [], []
    sizes = (_ROWS, _CHOICES), (_MANY_ROWS, _CHOICES), (_PADDING + 1, 2)
    for (rows, choices), tile in zip(sizes, (_TILES[0], *_TILES), strict=True):
        indices, num_live = _indices(count, rows)[:, :choices], rows - _PADDING
        got.append(plan_experts(mx.array(indices), count, mx.array([num_live], mx.int32)).array)
        expected.append(_plan(indices, count, tile))
    return largest(got, expected)


def mixture(check: Check[MixtureShape]) -> float:
    """Gate and up with the activation, and down.  For many rows, and for one row, whose short
    arrays MLX passes in another address space."""
    (shape, dtype), rng = check.shape, np.random.default_rng(0)
    indices = _indices(_EXPERTS)
    pairs, rows = indices.reshape(-1), np.arange(_ROWS).repeat(_CHOICES)
    # Halved: otherwise rounding errors of gate and up add up.
    x = rounded(draw(rng, (_ROWS, shape.hidden), dtype) / 2, dtype)
    clamped = shape.activation == "clamped_swiglu"
    activation = _CLAMPED if clamped else Activation(shape.activation)
    gated = shape.activation != "relu2"
    inward, outward = (shape.hidden, shape.quantisation), (shape.intermediate, shape.down)
    (gate, of_gate), (up, of_up), (down, of_down) = (
        _weight(rng, depth, dtype, how, shape.biased) for depth, how in (inward, inward, outward)
    )
    where = mx.array(pairs.astype(np.uint32))
    of_live = (rows < _ROWS - _PADDING)[:, None]
    inner = activated(of_gate(x[rows], pairs), of_up(x[rows], pairs), activation) * of_live
    y = draw(rng, (len(pairs), shape.intermediate), dtype)
    outer = of_down(y, pairs) * of_live
    plans = []
    for tile in _TILES:
        order = mx.array(_plan(indices, _EXPERTS, tile))
        plans.append((_ROWS, ExpertPlan(order, most_tiles(len(pairs), _EXPERTS, tile), tile)))
    got, expected = [], []
    for count, tiles in [*plans, (1, plan_experts(where[:_CHOICES][None], _EXPERTS))]:
        own = where[: count * _CHOICES]
        first, other = mx.array(x[:count]).astype(dtype), up if gated else None
        got.append(
            expert_product(first, own, tiles, gate, up=other, activation=activation, share=_CHOICES)
        )
        got.append(expert_product(mx.array(y[: len(own)]).astype(dtype), own, tiles, down))
        expected += [inner[: len(own)], outer[: len(own)]]
    return largest(got, expected, TOLERANCE[dtype])


def topk(check: Check[MixtureShape]) -> float:
    """Each way to score and to weigh, in both orders; equal scores, and a bias for half of them.
    Half of the rows are so large that their exponentials overflow."""
    count, dtype, rng = check.shape.experts.experts, check.shape.dtype, np.random.default_rng(0)
    top_k = min(_MOST_CHOSEN, count)
    got: list[mx.array] = []
    expected: list[np.ndarray] = []
    # Each value occurs twice; different values are apart by more than rounding.
    places = rng.permuted(np.tile(np.arange(count), (_ROWS, 1)), axis=1)
    large = 300 * (np.arange(_ROWS)[:, None] % 2)
    logits = rounded(places // 2 * (8 / count) - 3 + large, dtype)
    x = mx.array(logits).astype(dtype)
    bias = rng.permutation(count) % 2 * 2.0
    for routing in _ROUTINGS:
        biased = routing.scoring == "sigmoid"
        added = mx.array(bias.astype(np.float32)) if biased else None
        got += expert_topk(x, top_k, routing, dtype=mx.float32, bias=added)
        expected += _chosen(logits, top_k, routing, bias * biased)
    return largest(got, expected, TOLERANCE[mx.float32])


def _chosen(
    logits: np.ndarray, top_k: int, routing: Routing, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    scores = logits.astype(np.float64)
    if routing.scoring == "softmax":
        scores = _softmax(scores)
    elif routing.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-scores))
    if routing.late:
        indices = np.argsort(scores + bias, axis=-1, kind="stable")[:, -top_k:]
    else:
        indices = np.argsort(-scores - bias, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, indices, axis=-1)
    if routing.weights == "renormalized":
        weights = weights / (weights.sum(-1, keepdims=True) + routing.eps)
    elif routing.weights == "softmax":
        weights = _softmax(weights)
    return indices, weights * routing.factor


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def weighted_sum(check: Check[MixtureShape]) -> float:
    dtype, rng = check.shape.dtype, np.random.default_rng(0)
    x = draw(rng, (_ROWS * _CHOICES, check.shape.experts.hidden), dtype)
    weights = rng.random((_ROWS, _CHOICES)).astype(np.float32) / _CHOICES
    expected = (x.reshape(_ROWS, _CHOICES, -1) * weights[..., None]).sum(1)
    got = [
        expert_sum(mx.array(x[: rows * _CHOICES]).astype(dtype), mx.array(weights[:rows]), dtype)
        for rows in (_ROWS, 1)
    ]
    return largest(got, [expected, expected[:1]], TOLERANCE[dtype])


def _indices(experts: int, rows: int = _ROWS) -> np.ndarray:
    """The choices: all experts in turn for a quarter of the rows, then only the last expert."""
    indices = np.arange(rows * _CHOICES).reshape(rows, _CHOICES) % experts
    indices[rows // 4 :] = experts - 1
    return indices.astype(np.uint32)


def _plan(indices: np.ndarray, experts: int, tile: int) -> np.ndarray:
    """The plan that metal/expert_plan.metal makes: the order of the pairs, and the tiles."""
    chosen = indices.astype(np.int64)
    chosen[-_PADDING:] = experts
    pairs = chosen.reshape(-1)
    counts = np.bincount(pairs, minlength=experts + 1)
    tiles = [
        (first + at, min(tile, count - at))
        for first, count in zip(np.cumsum(counts) - counts, counts, strict=True)
        for at in range(0, count, tile)
    ]
    live = (len(indices) - _PADDING) * indices.shape[1]
    tiles = [(first, count if first < live else -count) for first, count in tiles]
    room = max(MIN_ELEMENTS // 2, most_tiles(len(pairs), experts, tile))
    tiles += [(0, 0)] * (room - len(tiles))
    order = np.argsort(pairs, kind="stable")
    return np.concatenate([order, np.reshape(tiles, -1)]).astype(np.int32)


def _weight(
    rng: np.random.Generator, depth: int, dtype: mx.Dtype, how: Quantisation | None, biased: bool
) -> tuple[ExpertWeight, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """A weight, and its product by definition."""
    weight, values = draw_weight(rng, (_EXPERTS, _OUTPUTS, depth), dtype, how)
    bias = draw(rng, (_EXPERTS, _OUTPUTS), dtype) if biased else None

    def by_definition(rows: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        product = np.einsum("pod,pd->po", values[pairs], rows)
        return product if bias is None else product + bias[pairs]

    added = None if bias is None else mx.array(bias).astype(dtype)
    return ExpertWeight(weight, added), by_definition
