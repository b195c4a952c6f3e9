"""Random arrays that a type holds exactly, and arrays as float64, bits or rows of a store."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.row_format import RowFormat

# (absolute, relative).  Measured: float32 at most 3e-7, float16 3e-4, bfloat16 3e-3.
TOLERANCE = {mx.float32: (1e-5, 1e-5), mx.float16: (2e-3, 2e-3), mx.bfloat16: (1.5e-2, 1e-2)}
# The inputs that kernels write to.
STORE = ("keys", "values")


def draw(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """Normal floats that `dtype` holds exactly."""
    return np.array(normal(rng, *shape, dtype=dtype).astype(mx.float32))


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return of_type(rng.standard_normal(shape), dtype)


def seeded(*shape: int, seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return normal(np.random.default_rng(seed), *shape, dtype=dtype)


def of_type(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Numbers in float64, rounded to float32 and then to `dtype`."""
    return mx.array(values.astype(np.float32)).astype(dtype)


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def raw(array: mx.array) -> np.ndarray:
    """The bits of an array."""
    return np.array(array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size]))


def rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Numbers, rounded to `dtype`."""
    return np.array(of_type(values, dtype).astype(mx.float32))


def in_store(row: RowFormat, values: np.ndarray) -> mx.array:
    """Rows in the format of a store.  A quantised row of NaN gets scales that are NaN."""
    kept = row.pack(mx.array(values).astype(row.dtype))
    if row.bits is None:
        return kept
    return mx.where(mx.array(np.isnan(values).any(-1, keepdims=True)), 0xFFFFFFFF, kept)


def from_store(row: RowFormat, kept: mx.array) -> np.ndarray:
    """The values that stored rows represent."""
    return np.array(row.unpack(kept).astype(mx.float32))
