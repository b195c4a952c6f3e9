"""Where the elements of MLX arrays lie, and new arrays for a kernel to write."""

import functools

import mlx.core as mx
import numpy as np


def elements(array: mx.array) -> np.ndarray:
    """The elements of an array, sharing its memory; bfloat16, which numpy lacks, as uint16."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(bits)
    return np.asarray(memoryview(bits))


@functools.cache
def _first_address() -> int:
    return elements(mx.zeros(64)).ctypes.data % 16


def misalignment(array: mx.array) -> int:
    """Bytes past a multiple of 16 at which the array would start on a GPU.

    There a buffer starts at a page, and only a slice starts later; MLX's buffers on a CPU all start
    at the same place between two multiples of 16.
    """
    return (elements(array).ctypes.data - _first_address()) % 16


def row_contiguous(array: mx.array) -> mx.array:
    """The array if its rows are contiguous, else a contiguous copy."""
    return array if elements(array).flags.c_contiguous else mx.contiguous(array)


def new_output(shape: tuple[int, ...], dtype: mx.Dtype, init_value) -> mx.array:
    """A new array, filled with `init_value`, or with bytes 0xff."""
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    if init_value is not None:
        elements(array)[...] = elements(mx.array(init_value, dtype))
    elif array.size:
        raw = elements(array)
        raw.reshape(-1).view(np.uint8)[:] = 0xFF
    return array
