"""The errors of a kernel's results, and the allowed ones."""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import LayerStore
from vllm_metal_lite.kv.row_format import RowFormat

# Largest |kernel - reference| / (1 + |reference|).  The reference computes in float32 from the same
# rounded inputs; a kernel rounds its result, and in prompts also the weights, to the type.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 1.5e-2}

# The largest error, and the allowed one.
ErrorAndLimit = tuple[float, float]


def largest_error(got: mx.array, expected: np.ndarray, allowed: np.ndarray | None = None) -> float:
    """The largest |got - expected| / allowed where `expected` is finite; NaN counts as infinite.

    allowed: by default 1 + |expected|.
    """
    values = np.array(got.astype(mx.float32), np.float64)
    if values.shape != expected.shape:
        raise ValueError(f"shape {values.shape} instead of {expected.shape}")
    wanted = np.isfinite(expected)
    allowed = 1 + np.abs(expected) if allowed is None else allowed
    error = np.abs(values[wanted] - expected[wanted]) / allowed[wanted]
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))


def largest(got: Sequence[mx.array], expected: Sequence[np.ndarray]) -> float:
    """The largest error of several arrays."""
    return max(largest_error(a, wanted) for a, wanted in zip(got, expected, strict=True))


def of_store(
    store: LayerStore, expected: Sequence[np.ndarray], rounding: float = 0.0, error: float = 0.0
) -> ErrorAndLimit:
    """The larger of the error of K and V in a store, and `error`, that of other rows.

    rounding: the allowed error of all rows, before they are stored.
    If the store is quantised, both numbers are fractions of what is allowed.
    """
    spec = store.spec
    formats, arrays = (spec.k_row, spec.v_row), (store.keys, store.values)
    stored = max(
        largest_error(row.unpack(array), wanted, _lost(row, wanted, rounding))
        for row, array, wanted in zip(formats, arrays, expected, strict=True)
    )
    if spec.bits is None:
        return max(error, stored), rounding
    return max(error / rounding if error else 0.0, stored), 1.0


def _lost(row: RowFormat, values: np.ndarray, rounding: float) -> np.ndarray | None:
    """The largest change by quantisation of each value: half a step, plus rounding to the dtype.

    None: rows of this format are not quantised.
    """
    if row.bits is None:
        return None
    groups = values.reshape(*values.shape[:-1], -1, row.group_size)
    step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / ((1 << row.bits) - 1)
    rounded = (TOLERANCE[row.dtype] + rounding) * (1 + np.abs(groups))
    return (0.5 * step + rounded).reshape(values.shape)
