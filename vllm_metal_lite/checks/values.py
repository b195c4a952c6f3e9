"""Random values, and norms and activations by definition, in NumPy."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.experts import Activation
from vllm_metal_lite.kernels.weights import QuantisedWeight, Weight, quantised
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
    """One more row, of padding: zeros."""
    return np.concatenate([rows, np.zeros_like(rows[:1])])


def draw_weight(
    rng: np.random.Generator, dims: tuple[int, ...], dtype: mx.Dtype, how: Quantisation | None
) -> tuple[Weight, np.ndarray]:
    """A weight (.., outputs, depth), quantised if `how` says so, and its values."""
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
    """Rounded where MLX's own norm rounds."""
    square = (x.astype(np.float64) ** 2).mean(-1, keepdims=True)
    return rounded(rounded(x / np.sqrt(square + eps), dtype) * weight, dtype)
