"""skinny_gemm on the CPU host, under the checker, against the product in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.host import compiler_available, installed
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.products import MAX_ROWS, GemmPlan, fits, gemm_plan, skinny_gemm

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")

DTYPES = [mx.float16, mx.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def host():
    with installed(checked=True, schedule=3):
        yield


def draw(rows: int, outputs: int, depth: int, dtype: mx.Dtype, seed: int = 0) -> list[mx.array]:
    """x (rows, depth) and weight (outputs, depth)."""
    rng = np.random.default_rng(seed)
    shapes = (rows, depth), (outputs, depth)
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in shapes]


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def check(x: mx.array, weight: mx.array, plan: GemmPlan | None = None) -> None:
    """Rounded once, from a sum in float32."""
    got = skinny_gemm(x, weight, plan)
    assert got.dtype == x.dtype
    half_a_step = {mx.float16: 2**-11, mx.bfloat16: 2**-8}[x.dtype]
    np.testing.assert_allclose(floats(got), floats(x) @ floats(weight).T, half_a_step, 1e-4)


@given(
    st.integers(1, MAX_ROWS),
    st.integers(1, 70),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_random_shapes(rows, outputs, chunks, dtype, seed):
    check(*draw(rows, outputs, 32 * chunks, dtype, seed))


# Those of gemm_plan; fewer rows held than there are, and one simdgroup.
PLANS = [
    GemmPlan(8, 1), GemmPlan(8, 2), GemmPlan(8, 4), GemmPlan(16, 2), GemmPlan(16, 1),
    GemmPlan(1, 2), GemmPlan(3, 3),
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("rows", [5, 64])
def test_plans(rows, plan):
    check(*draw(rows, 150, 1120, mx.bfloat16), plan)


def test_the_plans_that_are_used_are_tried_here():
    used = {gemm_plan(rows, outputs) for rows in range(1, 65) for outputs in (100, 4096, 10**5)}
    assert used <= set(PLANS)


def test_a_weight_of_many_rows():
    """By the plan for it, the last threadgroup not full."""
    check(*draw(17, 4100, 64, mx.bfloat16))


@pytest.mark.parametrize("schedule", ["reverse", 1])
def test_the_order_in_which_threads_run_changes_nothing(schedule):
    """With sums of some rows, then of others."""
    x, weight = draw(60, 40, 640, mx.bfloat16)
    expected = floats(skinny_gemm(x, weight, GemmPlan(8, 1)))
    with installed(schedule=schedule):
        got = floats(skinny_gemm(x, weight, GemmPlan(8, 1)))
    np.testing.assert_array_equal(got, expected)


def test_rows_do_not_touch_each_other():
    """NaN in a row of x and in one of the weight, and infinity in the row that padding repeats."""
    x, weight = draw(11, 21, 96, mx.float16)
    expected = floats(skinny_gemm(x, weight))
    x[3, 7], x[10, 0], weight[18, 95] = np.nan, np.inf, np.nan
    got = floats(skinny_gemm(x, weight))
    wrong = np.zeros((11, 21), bool)
    wrong[3] = wrong[:, 18] = True
    np.testing.assert_array_equal(np.isnan(got), wrong)
    assert np.isinf(got[10, :18]).all()
    wrong[10] = True
    np.testing.assert_array_equal(got[~wrong], expected[~wrong])


def test_rows_of_a_larger_array():
    """What lies behind them, and behind the weight, is NaN."""
    x, weight = draw(16, 24, 64, mx.bfloat16)
    expected = floats(skinny_gemm(x[4:9], weight[8:21]))
    x[:4] = x[9:] = weight[:8] = weight[21:] = np.nan
    np.testing.assert_array_equal(floats(skinny_gemm(x[4:9], weight[8:21])), expected)


BAD = {
    "more rows than 64": ((65, 32), (8, 32), mx.float16, mx.float16),
    "half a chunk": ((2, 48), (8, 48), mx.float16, mx.float16),
    "float32": ((2, 32), (8, 32), mx.float32, mx.float32),
    "unlike types": ((2, 32), (8, 32), mx.float16, mx.bfloat16),
    "unlike depths": ((2, 32), (8, 64), mx.float16, mx.float16),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    *shapes, dtype, other = BAD[bad]
    x, weight = mx.zeros(shapes[0], dtype), mx.zeros(shapes[1], other)
    assert fits(x, weight) is (bad == "unlike depths")  # which no layer has
    with pytest.raises(ValueError, match=r"x \(.* must be of one 16-bit .* at most 64 rows"):
        skinny_gemm(x, weight)
