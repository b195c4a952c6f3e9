"""Packed rows that are columns of a wider array, as kernels read them."""

from typing import Any, NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Template


class Columns(NamedTuple):
    """The columns from `start` on of an array (N, width) or (N, 1, width), row-contiguous: heads,
    latents or gates of N packed rows.  origin: the array's (fusion/traced.py), if known.
    """

    array: mx.array
    start: int
    origin: Any = None


def columns_template(
    name: str, columns: Columns, rows: int, size: int, dtype: mx.Dtype
) -> Template:
    """Template values for `size` columns of the input `name`: NAME_WIDTH and NAME_START.

    Raises ValueError if the columns lie outside their array, which has `rows` rows of dtype.
    """
    (array, start, _), width = columns, columns.array.shape[-1]
    if not 0 <= start <= width - size or len(array) != rows or array.dtype != dtype:
        raise ValueError(
            f"{name} is columns {start} to {start + size} of {rows} rows of {dtype}, "
            f"but its array is {array.shape} {array.dtype}"
        )
    return {f"{name.upper()}_WIDTH": width, f"{name.upper()}_START": start}
