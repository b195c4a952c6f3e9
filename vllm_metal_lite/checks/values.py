"""Values for checks: random inputs, norms and activations by definition, allowed errors."""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.experts import Activation
from vllm_metal_lite.kernels.store import LayerStore
from vllm_metal_lite.kernels.weight_formats import QuantisedWeight, Weight, quantised
from vllm_metal_lite.specs import Quantisation

# The epsilon of norms.
EPS = 1e-5
# More than eight rows: MLX passes smaller arrays to a kernel in another address space.
ROWS = 9


def draw(rng: np.random.Generator, dims: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    """Normal values, rounded to `dtype`, as float32."""
    return rounded(rng.standard_normal(dims, np.float32), dtype)


def rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Values rounded to `dtype`, as float32."""
    with mx.stream(mx.cpu):
        return np.array(mx.array(values.astype(np.float32)).astype(dtype).astype(mx.float32))


def padded(rows: np.ndarray) -> np.ndarray:
    """The rows, and a row of padding: zeros."""
    return np.concatenate([rows, np.zeros_like(rows[:1])])


def draw_weight(
    rng: np.random.Generator, dims: tuple[int, ...], dtype: mx.Dtype, how: Quantisation | None
) -> tuple[Weight, np.ndarray]:
    """A weight (.., outputs, depth), and its values.  how: its quantisation, or None."""
    values = rounded(draw(rng, dims, dtype) / dims[-1] ** 0.5, dtype)
    plain = mx.array(values).astype(dtype)
    if how is None:
        return plain, values
    packed = quantised(plain, how)
    return packed, rounded(_dequantised(packed), dtype)


def _dequantised(weight: QuantisedWeight) -> np.ndarray:
    """The values (outputs, depth) in float32, by MLX on the CPU."""
    bits, group_size, mode = weight.quantisation
    scales, biases = weight.scales, weight.biases
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values = mx.dequantize(
        weight.words, scales, biases, group_size, bits, mode, dtype=mx.float32, stream=mx.cpu
    )
    return np.array(values)


def activated(gate: np.ndarray, up: np.ndarray, how: Activation) -> np.ndarray:
    """The activation of gate and up, by definition."""
    if how.kind == "relu2":
        return np.maximum(gate, 0) ** 2
    if how.kind == "clamped_swiglu":
        gate, up = np.minimum(gate, how.limit), np.clip(up, -how.limit, how.limit) + 1
    # gelu's (1 + tanh(z)) / 2 is the sigmoid of 2 z.
    cubic = gate + 0.044715 * gate**3
    steep = (8 / np.pi) ** 0.5 * cubic if how.kind == "geglu" else how.alpha * gate
    return gate / (1 + np.exp(-steep)) * up


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, dtype: mx.Dtype) -> np.ndarray:
    """The norm of x, rounded where MLX rounds."""
    square = (x.astype(np.float64) ** 2).mean(-1, keepdims=True)
    return rounded(rounded(x / np.sqrt(square + eps), dtype) * weight, dtype)


# Largest |kernel - reference| / (1 + |reference|).  The reference computes in float32 from the same
# rounded inputs; a kernel rounds its result, and in prompts also the weights, to the type.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 1.5e-2}


def largest_error(
    got: mx.array, expected: np.ndarray, rounding: float = 0.0, half_step: np.ndarray | float = 0.0
) -> float:
    """The largest error where `expected` is finite, as a share of the allowed one, which is
    rounding * (1 + |expected|) + half_step.

    Infinite for NaN, and for any error if none is allowed.  half_step: quantisation's own error.
    """
    values = np.array(got.astype(mx.float32), np.float64)
    if values.shape != expected.shape:
        raise ValueError(f"shape {values.shape} instead of {expected.shape}")
    finite = np.isfinite(expected)
    error = np.abs(values[finite] - expected[finite])
    with np.errstate(divide="ignore", invalid="ignore"):
        allowed = rounding * (1 + np.abs(expected)) + half_step
        shares = np.where(error == 0, 0.0, error / allowed[finite])
    return float(np.nan_to_num(shares, nan=np.inf, posinf=np.inf).max(initial=0.0))


def largest(
    got: Sequence[mx.array], expected: Sequence[np.ndarray], rounding: float = 0.0
) -> float:
    """The largest error of several arrays."""
    return max(largest_error(*pair, rounding) for pair in zip(got, expected, strict=True))


def store_error(store: LayerStore, expected: Sequence[np.ndarray], rounding: float = 0.0) -> float:
    """The larger error of K and V in a store.  rounding: the error that the rows may have before
    they are stored."""
    spec, errors = store.spec, []
    formats, arrays = (spec.k_row, spec.v_row), (store.keys, store.values)
    for row, array, rows in zip(formats, arrays, expected, strict=True):
        rounding_of_row, half_step = rounding, np.array(0.0)
        if row.bits is not None:
            rounding_of_row += TOLERANCE[row.dtype]
            half_step = _half_step(rows, row.bits, row.group_size)
        errors.append(largest_error(row.unpack(array), rows, rounding_of_row, half_step))
    return max(errors)


def _half_step(values: np.ndarray, bits: int, group_size: int) -> np.ndarray:
    """The largest change of each value by quantisation."""
    groups = values.reshape(*values.shape[:-1], -1, group_size)
    step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / ((1 << bits) - 1)
    return np.broadcast_to(0.5 * step, groups.shape).reshape(values.shape)
