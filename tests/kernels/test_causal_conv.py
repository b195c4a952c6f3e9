"""causal_conv on the CPU host, under the checker, against float64 and MLX's own."""

import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.recurrent_cases import (
    DTYPES,
    RAGGED,
    TOLERANCE,
    Segments,
    conv_by_definition,
    rounded,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.store import new_ticket

pytestmark = pytest.mark.usefixtures("host_or_gpu")
WRITTEN = ("states",)


class Case:
    """Random rows of C channels for the segments, a weight, and a bias or None."""

    def __init__(self, segments, channels=40, size=4, bias=True, silu=True, dtype=mx.float32):
        rng = np.random.default_rng(segments.seed)
        self.segments, self.silu, self.dtype = segments, silu, dtype
        shapes = [(segments.num_rows, channels), (channels, size), (channels,)]
        drawn = [rounded(rng.standard_normal(shape), dtype) for shape in shapes]
        self.x, self.weight, self.bias = drawn if bias else [*drawn[:2], None]
        self.states = segments.states(size - 1, channels, dtype=dtype)

    def arrays(self):
        return [
            None if a is None else mx.array(a).astype(self.dtype)
            for a in (self.x, self.weight, self.bias, self.states)
        ]

    def run(self):
        """The kernel's y, and the states after the launch."""
        x, weight, bias, states = self.arrays()
        segments = self.segments.array
        where = mx.array(segments), mx.array(plan_conv_tiles(segments)), new_ticket()
        y, ticket = causal_conv(Columns(x, 0), weight, bias, states, *where, silu=self.silu)
        mx.eval(y, ticket)
        assert y.dtype == self.dtype
        return [np.array(a.astype(mx.float32)) for a in (y, states)]

    def check(self):
        y, states = self.run()
        expected, after = conv_by_definition(
            self.segments, self.states, self.x, self.weight, self.bias, self.silu
        )
        rows = len(expected)
        np.testing.assert_allclose(y[:rows], expected, *TOLERANCE[self.dtype])
        assert not y[rows:].any()
        np.testing.assert_array_equal(states, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bias", "silu"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ragged_segments(size, bias, silu, dtype):
    Case(Segments(**RAGGED), 40, size, bias, silu, dtype).check()


@given(
    st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 18),
    st.sampled_from([8, 70, 300]),
    st.integers(2, 5),
    st.integers(0, 99),
)
@settings(max_examples=25)
def test_random_segments(parts, padding, channels, size, seed):
    Case(Segments.drawn(parts, padding, seed), channels, size).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_as_mlx_s_convolution(dtype):
    """The reference calls mx.conv1d as mlx-lm does: on carried rows and new rows, then SiLU."""
    case = Case(Segments([19]), size=4, dtype=dtype)
    x, weight, bias, states = case.arrays()
    layer = nn.Conv1d(40, 40, 4, groups=40)
    layer.weight, layer.bias = weight[:, :, None], bias
    rows = mx.concatenate([states[case.segments.initial[0]], x])[None]
    theirs = nn.silu(layer(rows)[0])
    tolerance = 4 * TOLERANCE[dtype][0]  # mlx-lm rounds before SiLU and within SiLU
    y, after = case.run()
    np.testing.assert_allclose(y, np.array(theirs.astype(mx.float32)), tolerance, tolerance)
    np.testing.assert_array_equal(
        after[case.segments.final[0]], np.array(rows[0, -3:].astype(mx.float32))
    )


@pytest.mark.parametrize("cut", [1, 2, 3, 16, 20])
def test_a_prompt_in_two_chunks_is_the_whole_prompt(cut):
    whole = Case(Segments([37], fresh={0}))
    y, states = whole.run()
    head = Case(Segments([cut], fresh={0}))
    head.x, head.weight, head.bias = whole.x[:cut], whole.weight, whole.bias
    first, head_states = head.run()
    tail = Case(Segments([37 - cut]))
    tail.x, tail.weight, tail.bias = whole.x[cut:], whole.weight, whole.bias
    tail.states[tail.segments.initial[0]] = head_states[head.segments.final[0]]
    second, tail_states = tail.run()
    np.testing.assert_array_equal(np.concatenate([first, second]), y)
    np.testing.assert_array_equal(
        tail_states[tail.segments.final[0]], states[whole.segments.final[0]]
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_drafts_leave_the_rows_before_each(size):
    for count in range(1, 9):
        Case(Segments.drafted([2, 9, 40, 17], count), size=size).check()


def test_columns_of_a_wider_array():
    case = Case(Segments(**RAGGED))
    expected, _ = case.run()
    x, weight, bias, states = case.arrays()
    wide = mx.concatenate([x + 1, x, x + 2], axis=1)[:, None]
    segments = case.segments.array
    arrays = mx.array(plan_conv_tiles(segments)), new_ticket()
    y, _ = causal_conv(
        Columns(wide, 40), weight, bias, states, mx.array(segments), *arrays, silu=True
    )
    np.testing.assert_array_equal(np.array(y), expected)


def test_large_values_do_not_overflow():
    case = Case(Segments([4], fresh={0}), bias=False)
    case.x *= 1e4
    y, _ = case.run()
    assert np.isfinite(y).all()
    case.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": mx.zeros((9, 4))}, r"x is columns 0 to 9 of .* but its array is \(2, 8\)"),
        ({"x": Columns(mx.zeros((2, 8), mx.float16), 0)}, r"array is \(2, 8\) mlx.core.float16"),
        ({"x": Columns(mx.zeros((2, 15)), 8)}, r"8 to 16 of .* is \(2, 15\)"),
        ({"bias": mx.zeros(8, mx.float16)}, r"bias must be \(8,\) .*, not \(8,\) mlx.core.float16"),
        ({"bias": mx.zeros(9)}, r"bias must be \(8,\) mlx.core.float32, not \(9,\)"),
        ({"states": mx.zeros((5, 4, 8))}, r"states must be \(5, 3, 8\) .*, not \(5, 4, 8\)"),
    ],
)
def test_bad_input_is_named(change, message):
    segments = Segments([2]).array
    arrays = {"x": Columns(mx.zeros((2, 8)), 0), "weight": mx.zeros((8, 4)), "bias": None}
    arrays |= {"states": mx.zeros((5, 3, 8)), "segments": mx.array(segments)}
    arrays |= {"tiles": mx.array(plan_conv_tiles(segments)), "ticket": new_ticket()}
    with pytest.raises(ValueError, match=message):
        causal_conv(**(arrays | change), silu=True)
