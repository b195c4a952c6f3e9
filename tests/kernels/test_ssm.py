"""gated_delta on the CPU host, under the checker, as Mamba 2's state space update: against its
definition in float64 and mlx-lm's functions.

With METAL_LITE_DEVICE=gpu the same cases run on MLX's GPU instead of the host.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.ssm import compute_dt, ssm_attn

from tests.support.recurrent_cases import (
    DTYPES,
    RAGGED,
    TOLERANCE,
    Segments,
    recurrence_by_definition,
    rounded,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.ssm import ssm_update

pytestmark = pytest.mark.usefixtures("host_or_gpu")
WRITTEN = ("states",)
LIMITS = (0.001, 100.0)


class Case:
    """Heads and groups, rows of `dims` (of x, of b and c), as a layer gives them to mlx-lm."""

    def __init__(self, segments, heads=4, groups=2, dims=(16, 32), *, dtype=mx.float32, tiles=True):
        rng = np.random.default_rng(segments.seed)
        rows, (head_dim, state_dim) = segments.num_rows, dims
        self.segments, self.dtype = segments, dtype
        self.max_seqlen = segments.max_seqlen if tiles else 1
        self.x = rounded(rng.standard_normal((rows, heads, head_dim)), dtype)
        b, c = rng.standard_normal((2, rows, groups, state_dim)) * state_dim**-0.5
        self.b, self.c = rounded(b, dtype), rounded(c, dtype)
        self.raw_dt = rounded(rng.standard_normal((rows, heads)), dtype)
        self.dt_bias, self.d = rounded(rng.standard_normal((2, heads)), mx.float32)
        self.a_log = np.log(rng.uniform(0.05, 2, heads)).astype(np.float32)
        self.pool = segments.pool(heads, head_dim, state_dim)

    def wide(self, array):
        return mx.array(array).astype(self.dtype)

    def dt(self):
        return compute_dt(self.wide(self.raw_dt), mx.array(self.dt_bias), LIMITS)

    def run(self):
        """y and the pool afterwards."""
        states = mx.array(self.pool)
        rows = map(self.wide, (self.x, self.b, self.c))
        a = -mx.exp(mx.array(self.a_log))
        y, token = ssm_update(
            *(Columns(row.reshape(len(row), -1), 0) for row in rows), self.dt(), a,
            mx.array(self.d), states, mx.array(self.segments.array), new_token(),
            num_groups=self.b.shape[1], max_seqlen=self.max_seqlen,
        )  # fmt: skip
        mx.eval(y, token)
        assert y.dtype == self.dtype
        return [np.array(a.astype(mx.float32)) for a in (y, states)]

    def check(self):
        y, states = self.run()
        dt = np.array(self.dt()).astype(np.float64)
        expected, after = recurrence_by_definition(
            self.segments, self.pool, self.c, self.b, self.x,
            np.exp(-np.exp(self.a_log.astype(np.float64)) * dt), dt, delta=False,
        )  # fmt: skip
        rows = len(expected)
        expected += self.d[:, None] * self.x[:rows]
        np.testing.assert_allclose(y[:rows], expected, *TOLERANCE[self.dtype])
        assert not y[rows:].any()
        np.testing.assert_allclose(states, after, *TOLERANCE[mx.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
def test_ragged_segments(tiles, dtype):
    Case(Segments(**RAGGED), dtype=dtype, tiles=tiles).check()


@pytest.mark.parametrize(
    ("heads", "groups", "dims"),
    [(4, 1, (64, 128)), (2, 2, (80, 16)), (6, 3, (8, 48)), (1, 1, (64, 256))],
)
def test_heads_groups_and_sizes(heads, groups, dims):
    segments = Segments([9, 1], fresh={0}, padding=1)
    Case(segments, heads, groups, dims).check()


@given(
    st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 9), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=15)
def test_random_segments(drawn, padding, seed):
    lengths, fresh = zip(*drawn, strict=True)
    segments = Segments(
        [*lengths], {s for s, is_so in enumerate(fresh) if is_so}, padding,
        [(s, n // 2) for s, n in enumerate(lengths)], seed=seed,
    )  # fmt: skip
    Case(segments, 2, 1, (8, 16)).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_as_mlx_lm_s_function(dtype):
    case = Case(Segments([19]), dtype=dtype)
    slot = int(case.segments.final[0])
    batch = [case.wide(a)[None] for a in (case.x, case.b, case.c, case.raw_dt)]
    x, b, c, dt = batch
    theirs, state = ssm_attn(
        x, mx.array(case.a_log), b, c, mx.array(case.d), dt, mx.array(case.dt_bias),
        mx.array(case.pool[slot])[None], LIMITS, step=8,
    )  # fmt: skip
    y, states = case.run()
    rtol, atol = TOLERANCE[dtype]
    theirs = np.array(theirs[0].astype(mx.float32))
    # mlx-lm rounds the recurrence's part before it adds d * x.
    room = 2 * rtol * np.abs(case.d[:, None] * case.x).max()
    np.testing.assert_allclose(y, theirs, 2 * rtol, 4 * atol + room)
    rtol, atol = TOLERANCE[mx.float32]
    np.testing.assert_allclose(states[slot], np.array(state[0]), rtol, 2 * atol)


@pytest.mark.parametrize("cut", [1, 8, 13, 20])
def test_a_prompt_in_two_chunks_is_the_whole_prompt(cut):
    """Bit for bit, wherever it is cut."""
    whole = Case(Segments([21], fresh={0}))
    y, states = whole.run()
    results, state = [], None
    for begin, end in ((0, cut), (cut, 21)):
        part = Case(Segments([end - begin], fresh=set() if begin else {0}))
        for name in ("x", "b", "c", "raw_dt"):
            setattr(part, name, getattr(whole, name)[begin:end])
        part.dt_bias, part.d, part.a_log = whole.dt_bias, whole.d, whole.a_log
        if begin:
            part.pool[part.segments.initial[0]] = state
        result, after = part.run()
        results.append(result)
        state = after[part.segments.final[0]]
    np.testing.assert_array_equal(np.concatenate(results), y)
    np.testing.assert_array_equal(state, states[whole.segments.final[0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d": mx.zeros(3)}, r"a \(4,\) and d \(3,\) are not \(4,\)"),
        ({"b": Columns(mx.zeros((2, 16)), 0)}, r"k is columns 0 to 32 of .* \(2, 16\)"),
        ({"num_groups": 3}, "do not fit together"),
        ({"dt": mx.zeros((2, 4), mx.float16), "a": mx.zeros(4, mx.float16)}, "float16 are not"),
        ({"states": mx.zeros((3, 3, 8, 16))}, r"a \(4,\) and d \(4,\) are not \(3,\)"),
    ],
)
def test_bad_input_is_named(change, message):
    arrays = {"x": Columns(mx.zeros((2, 32)), 0), "b": Columns(mx.zeros((2, 32)), 0),
              "c": Columns(mx.zeros((2, 32)), 0), "num_groups": 2,
              "dt": mx.zeros((2, 4)), "a": mx.zeros(4), "d": mx.zeros(4),
              "states": mx.zeros((3, 4, 8, 16)), "segments": mx.array(Segments([2]).array),
              "token": new_token()}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ssm_update(**(arrays | change), max_seqlen=2)
