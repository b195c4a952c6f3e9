"""The errors of a kernel's results, and the allowed ones."""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.store import LayerStore

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
    """The larger error of K and V in a store.  rounding: of rows, before they are stored."""
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
