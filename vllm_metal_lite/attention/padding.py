"""Pads a step's arrays to sizes that repeat, so that compiled steps repeat."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n; n >= 1."""
    return 1 << (n - 1).bit_length()


def pad_rows(rows: np.ndarray, num_rows: int, value: int = 0) -> np.ndarray:
    """Pad (n, ...) to num_rows rows of `value`.  (np.pad takes ten times as long.)"""
    if len(rows) == num_rows:
        return rows
    out = np.full((num_rows, *rows.shape[1:]), value, rows.dtype)
    out[: len(rows)] = rows
    return out


def padded(rows: np.ndarray, num_rows: int) -> mx.array:
    """(n,) -> (num_rows,) or more, on the device."""
    return mx.array(pad_rows(rows, max(num_rows, MIN_ELEMENTS)))


def padded_tables(tables: np.ndarray, num_rows: int, width: int) -> mx.array:
    """Block tables cut or padded with zeros to (num_rows, width), on the device."""
    out = np.zeros((num_rows, width), tables.dtype)
    out[: len(tables), : tables.shape[1]] = tables[:, :width]
    return mx.array(out)
