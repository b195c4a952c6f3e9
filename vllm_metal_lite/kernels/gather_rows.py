"""Gathers rows of an array by index, in one launch that moves only their bytes."""

import math

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Kernel, Template, grid_for

_GATHER_ROWS = Kernel("gather_rows", ["rows", "index"], ["out"])


def gather_rows(rows: mx.array, index: mx.array) -> mx.array:
    """rows[index]: rows (M, ...), valid index int32 of any shape -> (*index.shape, ...).

    A row must be a multiple of 4 bytes, with at least 8 elements; otherwise ValueError.
    """
    width = rows.size // len(rows)
    words, rest = divmod(width * rows.dtype.size, 4)
    if rest or width < MIN_ELEMENTS:
        raise ValueError(f"rows of {width} elements of {rows.dtype} are not whole words, 8 or more")
    vector = math.gcd(words, 4)
    threads, groups = grid_for(words // vector)
    shape = (*index.shape, *rows.shape[1:])
    inputs, grid = [rows, index.reshape(-1)], (index.size, groups, 1)
    template: Template = {"T": rows.dtype, "WIDTH": words, "W": vector, "THREADS": threads}
    return _GATHER_ROWS(inputs, template, grid, threads, [(shape, rows.dtype)])[0]
