"""The segments of a step as arrays, and the tiles that causal_conv cuts them into."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT as EMPTY
from vllm_metal_lite.kernels.causal_conv import TILE_ROWS, plan_conv_tiles
from vllm_metal_lite.recurrence.kernels import PADDING, pack_segments


def plan(cu_seqlens, initial, final, num_rows, checkpoints=()):
    arrays = (np.array(a, np.int32) for a in (cu_seqlens, initial, final))
    return pack_segments(*arrays, num_rows, checkpoints)


def test_a_row_has_its_slots_and_its_ends():
    segments = plan([0, 1, 5, 5], [3, EMPTY, 2], [3, 0, EMPTY], 8)
    np.testing.assert_array_equal(
        segments, [[0, 3, 1, 3], [1, EMPTY, 5, 0], [5, 2, 5, EMPTY], [5, PADDING, 8, EMPTY]]
    )


def test_checkpoints_come_before_the_end_in_order():
    segments = plan([0, 4, 9], [0, 1], [0, 1], 9, [(1, 8, 5), (0, 2, 4), (1, 6, 3)])
    np.testing.assert_array_equal(
        segments,
        [
            [0, 0, 0, EMPTY, 0, EMPTY, 2, 4, 4, 0],
            [4, 1, 4, EMPTY, 6, 3, 8, 5, 9, 1],
            [9, PADDING, 9, EMPTY, 9, EMPTY, 9, EMPTY, 9, EMPTY],
        ],
    )


def test_drafts_give_few_shapes():
    """Beside a request without any, too."""
    shapes = {}
    for count in range(1, 8):
        ends, slots = [0, 1, 2 + count, 3 + 2 * count], [0, 1, 2]
        for segments in ([1], [1, 2]):
            states = [(s, ends[s] + 1 + i, 9 * s + i) for s in segments for i in range(count)]
            shapes.setdefault(plan(ends, slots, slots, 32, states).shape, set()).add(count)
    assert shapes == {(4, 6): {1}, (4, 10): {2, 3}, (4, 18): {4, 5, 6, 7}}


@pytest.mark.parametrize("count", [0, 1])
def test_a_few_segments_are_an_array_of_eight_elements(count):
    segments = plan([0, 3][: count + 1], [0][:count], [0][:count], 3)
    assert segments.size == 8
    assert (segments[count:, 1] == PADDING).all()
    assert segments[-1, 2] == 3


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 20))
def test_tiles_cover_every_row_once_and_begin_every_segment(lengths, padding):
    ends = np.cumsum([0, *lengths])
    slots = np.arange(len(lengths))
    segments = plan(ends, slots, slots, int(ends[-1]) + padding)
    tiles = plan_conv_tiles(segments)
    assert tiles.size >= 8
    covered = np.zeros(ends[-1] + padding, int)
    for segment, first in tiles:
        begin, end = segments[segment, 0], segments[segment, -2]
        assert (first - begin) % TILE_ROWS == 0 or first == end
        covered[first : min(first + TILE_ROWS, end)] += 1
    assert (covered == 1).all()
    for s, begin in enumerate(segments[: len(lengths), 0]):
        assert tiles.tolist().count([s, begin]) == 1


def test_the_number_of_tiles_depends_on_the_number_of_segments_and_rows():
    counts = {
        len(plan_conv_tiles(plan([0, a, 40], [0, 1], [0, 1], 48))) for a in (0, 1, 16, 17, 40)
    }
    assert len(counts) == 1
