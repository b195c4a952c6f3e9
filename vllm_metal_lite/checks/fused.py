"""Checks the kernels that replace MLX operations around attention on this device.

The reference is computed in NumPy on this machine's CPU, rounded where MLX's own norm and rotation
round.
"""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.attention import of_store
from vllm_metal_lite.checks.case import activated, draw, draw_weight, rounded, spec_of
from vllm_metal_lite.checks.check import Check, NormShape, ProductShape
from vllm_metal_lite.checks.new_rows import EPS, drawn, last_position, rms_norm, tolerance
from vllm_metal_lite.checks.result import TOLERANCE, ErrorAndLimit, largest, largest_error
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.arguments import RMSNorm, new_ticket
from vllm_metal_lite.kernels.experts import Activation
from vllm_metal_lite.kernels.skinny_gemm import gemm_plan, skinny_gemm
from vllm_metal_lite.specs import AttentionShape

_ROWS = 9  # see case.CONTEXTS
_MOST_OUTPUTS = 256


def add_norm(check: Check[NormShape]) -> ErrorAndLimit:
    """Rows of the model's hidden size, with and without a norm of one summand."""
    (dim, dtype), rng = check.shape, np.random.default_rng(0)
    x, y = (draw(rng, (_ROWS, dim), dtype) for _ in range(2))
    weight = draw(rng, (dim,), dtype)
    a, b, gain = (mx.array(array).astype(dtype) for array in (x, y, weight))
    error = 0.0
    for norm in (None, RMSNorm(gain, EPS)):
        added = rounded(x + (y if norm is None else rms_norm(y, weight, EPS, dtype)), dtype)
        got = add_rms_norm(a, b, gain, EPS, norm)
        error = max(error, largest(got, (added, rms_norm(added, weight, EPS, dtype))))
    return error, TOLERANCE[dtype]


def product(check: Check[ProductShape]) -> ErrorAndLimit:
    """With norm, SwiGLU and residual, or with bias and gelu (PRODUCT_ROWS in for_model.py).

    The plan is that of the weight's own number of outputs; the product has fewer.
    """
    rows, shape, dtype = check.shape
    outputs, depth, how = shape
    width, rng = min(outputs, _MOST_OUTPUTS) // 2 * 2, np.random.default_rng(0)
    x = draw(rng, (rows, depth), dtype) / 2  # otherwise rounding errors of gate and up add up
    plan = gemm_plan(rows, shape)
    w, weight = draw_weight(rng, (width, depth), dtype, how)
    a = mx.array(x).astype(dtype)
    gate_columns = weight[: width // 2].T, weight[width // 2 :].T
    if rows % 4 == 0:
        bias = draw(rng, (width,), dtype) / 2
        halves = zip(gate_columns, np.split(bias, 2), strict=True)
        gate, up = (x @ columns + b for columns, b in halves)
        fused = skinny_gemm(a, w, plan=plan, bias=mx.array(bias).astype(dtype), gate="gelu_approx")
        return largest_error(fused, activated(gate, up, Activation("geglu"))), TOLERANCE[dtype]
    residual = draw(rng, (rows, width // 2), dtype)
    gain = draw(rng, (depth,), dtype) / 2
    normed = rms_norm(x, gain, EPS, dtype)
    gate, up = (normed @ columns for columns in gate_columns)
    r, g = (mx.array(array).astype(dtype) for array in (residual, gain))
    fused = skinny_gemm(a, w, plan=plan, norm=RMSNorm(g, EPS), residual=r, gate="silu")
    expected = activated(gate, up, Activation()) + residual
    return largest_error(fused, expected), TOLERANCE[dtype]


def write(check: Check[AttentionShape]) -> ErrorAndLimit:
    """Few rows and many; only few rows of latents."""
    counts = (_ROWS,) if check.kernel == "latent_write" else (_ROWS, profile().rope_many_rows)
    return max(_written(check, count) for count in counts)


def _written(check: Check[AttentionShape], rows: int) -> ErrorAndLimit:
    """New rows written to an empty store; every third row has no slot."""
    last = last_position(check)
    positions = np.linspace(0, last, rows).astype(np.int64)
    launch, new, (q, *fresh) = drawn(check, positions)
    spec = spec_of(check.shape)
    slots = np.random.default_rng(0).permutation(rows).astype(np.int32)
    slots[::3] = -1
    store = [
        mx.zeros((rows, spec.num_kv_heads, row.width), row.kept_dtype)
        for row in (spec.k_row, spec.v_row)
    ]
    mx.eval(store)
    place = {"positions": mx.array(positions.astype(np.int32)), "slot_mapping": mx.array(slots)}
    arrays = {"keys": store[0], "values": store[1], "ticket": new_ticket()}
    out, ticket = launch(new, **place, **arrays, spec=spec)
    mx.eval(out, ticket)
    expected = [np.zeros_like(a) for a in fresh]
    for empty, a in zip(expected, fresh, strict=True):
        empty[slots[slots >= 0]] = a[slots >= 0]
    return of_store(largest_error(out, q), store, spec, expected, tolerance(check, last))
