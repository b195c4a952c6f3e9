"""Mixtures of experts, and their results by definition, in float64."""

import numpy as np

from tests.support.kernels.arrays import floats, normal, of_type
from tests.support.kernels.quantised_weights import dequantised
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.experts import (
    Activation,
    ExpertPlan,
    Experts,
    ExpertWeight,
    most_tiles,
)
from vllm_metal_lite.kernels.weight_formats import QuantisedWeight, Weight
from vllm_metal_lite.specs import Quantisation

EXPERT_KERNELS = {"expert_plan", "expert_gemm", "expert_sum"}
SWIGLU, GEGLU, RELU2 = Activation(), Activation("geglu"), Activation("relu2")
OAI = Activation("clamped_swiglu", 1.702, 7.0)
HALF_A_STEP = {mx.float16: 2**-11, mx.bfloat16: 2**-8}


def indices_of(
    rows: int, top_k: int, num_experts: int, seed: int, skew: bool = False
) -> np.ndarray:
    """Random, distinct experts of each row.  skew: choose the first experts more often."""
    rng = np.random.default_rng(seed)
    score = rng.random((rows, num_experts)) * (np.arange(num_experts) + 1) ** (2.0 * skew)
    return np.argsort(score, axis=1)[:, :top_k].astype(np.uint32)


def plan_of(
    indices: np.ndarray, num_experts: int, tile: int, num_live: int | None = None
) -> ExpertPlan:
    """The plan for indices (rows, top_k) by definition, in tiles of `tile` pairs; rows from
    num_live on are padding."""
    chosen = indices.astype(np.int64)
    chosen[num_live if num_live is not None else len(indices) :] = num_experts
    pairs = chosen.reshape(-1)
    order, counts = np.argsort(pairs, kind="stable"), np.bincount(pairs, minlength=num_experts)
    tiles = [
        (first + at, min(tile, count - at) * (1 if expert < num_experts else -1))
        for expert, (first, count) in enumerate(
            zip(np.cumsum(counts) - counts, counts, strict=True)
        )
        for at in range(0, count, tile)
    ]
    room = most_tiles(len(pairs), num_experts, tile)
    tiles += [(0, 0)] * (max(4, room) - len(tiles))
    array = np.concatenate([order, np.reshape(tiles, -1)]).astype(np.int32)
    return ExpertPlan(mx.array(array), room, tile)


def draw_experts(
    count: int,
    hidden: int,
    inner: int,
    dtype: mx.Dtype,
    how: Quantisation | None = None,
    activation: Activation = SWIGLU,
    bias: bool = False,
    seed: int = 0,
) -> Experts:
    rng = np.random.default_rng(seed)

    def part(outputs: int, depth: int) -> ExpertWeight:
        values = rng.standard_normal((count, outputs, depth)) / depth**0.5
        weight: Weight = of_type(values, dtype)
        if how is not None:
            words, scales, *biases = mx.quantize(weight, how.group_size, how.bits, how.mode)
            weight = QuantisedWeight(words, scales, biases[0] if biases else None, how)
        added = normal(rng, count, outputs, dtype=dtype)
        return ExpertWeight(weight, added if bias else None)

    # The widths of some tested products cannot be quantised as a whole MLP.
    gate, up = part(inner, hidden), part(inner, hidden)
    down = part(hidden, inner) if inner % 32 == 0 else gate
    return Experts(gate, None if activation == RELU2 else up, down, activation)


def allowed_and_expected(
    x: mx.array, indices: np.ndarray, experts: Experts
) -> tuple[np.ndarray, np.ndarray]:
    """The allowed error of each pair's result, and the result (pairs, hidden)."""
    step, pairs = HALF_A_STEP[x.dtype], indices.reshape(-1)
    rows = floats(x).repeat(indices.shape[1], 0)
    nothing = np.zeros_like(rows)
    of_gate, gate = _product(rows, nothing, pairs, experts.gate, step)
    if experts.up is None:
        inner = np.maximum(gate, 0) ** 2
        of_inner = (2 * np.maximum(gate, 0) + of_gate) * of_gate + step * inner
    else:
        of_up, up = _product(rows, nothing, pairs, experts.up, step)
        inner, of_inner = _activated(gate, up, of_gate, of_up, experts.activation, step)
    return _product(inner, of_inner, pairs, experts.down, step)


def _product(
    rows: np.ndarray, errors: np.ndarray, pairs: np.ndarray, part: ExpertWeight, step: float
) -> tuple[np.ndarray, np.ndarray]:
    def product(weight: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.stack([weight[e] @ row for e, row in zip(pairs, rows, strict=True)])

    weight = _values(part.weight)
    expected, size = product(weight, rows), product(np.abs(weight), np.abs(rows))
    # Errors have random signs, so they add up like a random walk; the factor 3 makes it a limit.
    walk = 3 * product(weight**2, errors**2) ** 0.5
    is_rounded = not isinstance(part.weight, mx.array)
    rounded_weight = 3 * step * size / len(rows[0]) ** 0.5 * is_rounded
    allowed = 1e-5 + walk + rounded_weight + step * np.abs(expected)
    if part.bias is not None:
        expected = expected + floats(part.bias)[pairs]
        allowed = allowed + step * np.abs(expected)
    return allowed, expected


def _activated(
    gate: np.ndarray,
    up: np.ndarray,
    of_gate: np.ndarray,
    of_up: np.ndarray,
    how: Activation,
    step: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The result, and its allowed error: half a step for each rounding."""
    if how.kind == "clamped_swiglu":
        gate, up = np.minimum(gate, how.limit), np.clip(up, -how.limit, how.limit) + 1
    active = gate / (1 + np.exp(-how.alpha * gate))
    if how.kind == "geglu":
        active = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    # The steepest slope of x sigmoid(a x) is 1.1 for any a; that of gelu is 1.13.
    of_active = 1.13 * of_gate + 4 * step * np.abs(active)
    of_up = of_up + step * np.abs(up)
    result = active * up
    return result, of_active * (np.abs(up) + of_up) + np.abs(active) * of_up + step * np.abs(result)


def _values(weight: Weight) -> np.ndarray:
    if isinstance(weight, mx.array):
        return floats(weight)
    parts = (weight.words, weight.scales, weight.biases)
    experts = [
        QuantisedWeight(*(a if a is None else a[e] for a in parts), weight.quantisation)
        for e in range(len(weight.words))
    ]
    return np.stack([dequantised(expert) for expert in experts])
