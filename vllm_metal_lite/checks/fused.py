"""Checks the kernels that fuse norms with sums, and norms and activations with products.

The reference is computed in NumPy on this machine's CPU, rounded where MLX's own norm rounds.
"""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.accuracy import TOLERANCE, largest, largest_error
from vllm_metal_lite.checks.check import Check, NormShape, ProductShape
from vllm_metal_lite.checks.values import EPS, ROWS, activated, draw, draw_weight, rms_norm, rounded
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.experts import Activation
from vllm_metal_lite.kernels.norm_rope import RMSNorm
from vllm_metal_lite.kernels.skinny_gemm import gemm_plan, skinny_gemm

_MOST_OUTPUTS = 256


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
