"""Rows that know their columns."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.recurrence.tracked_columns import ColumnsOf, columns_of

WIDE = mx.arange(60.0).reshape(5, 12)


def rows():
    return ColumnsOf(WIDE[:, None, 4:10], Columns(WIDE, 4))


def read(x):
    """What a kernel reads for x: as many columns as x has, from its start on."""
    array, start, _ = columns_of(x)
    return np.array(array)[:, start : start + x.size // len(x)]


def test_views_read_the_array_that_they_come_from():
    for x in (rows(), rows().reshape(5, 1, 3, 2), rows()[..., 2:], rows()[..., :2]):
        assert columns_of(x).array is WIDE
        np.testing.assert_array_equal(read(x), np.array(x).reshape(5, -1))


def test_other_views_are_arrays_of_their_own():
    for x in (rows().reshape(1, 5, 6), rows()[1:], rows()[..., ::2], rows() + 1):
        assert type(x) is mx.array


def test_a_change_in_place_is_read():
    for change in ("x += 1", "x *= 2", "x[:] = 0"):
        x = rows()
        exec(change)
        np.testing.assert_array_equal(read(x), np.array(x).reshape(5, -1))
    np.testing.assert_array_equal(np.array(WIDE), np.arange(60.0).reshape(5, 12))
