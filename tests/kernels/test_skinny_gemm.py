"""skinny_gemm on the CPU host, under the checker, against products in float64, rounded where MLX's
own operations round."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.arrays import floats, normal
from tests.support.kernels.expert_cases import HALF_A_STEP
from tests.support.kernels.quantised_weights import dequantised
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.skinny_gemm import MAX_ROWS, GemmPlan, gemm_plan, serves, skinny_gemm
from vllm_metal_lite.kernels.weight_formats import (
    READABLE,
    QuantisedWeight,
    Weight,
    quantised,
    shape_of,
)
from vllm_metal_lite.specs import Quantisation, WeightShape

pytestmark = pytest.mark.usefixtures("host")

DTYPES = [mx.float16, mx.bfloat16]


def draw(rows: int, outputs: int, depth: int, dtype: mx.Dtype, seed: int = 0) -> list[mx.array]:
    """Random x (rows, depth) and weight (outputs, depth)."""
    rng = np.random.default_rng(seed)
    return [normal(rng, count, depth, dtype=dtype) for count in (rows, outputs)]


EPS = 0.03  # so large that a test notices another eps


def rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    return floats(mx.array(values.astype(np.float32)).astype(dtype))


def values(weight: Weight, dtype: mx.Dtype, in_lanes: bool = False) -> np.ndarray:
    """The weight as `skinny_gemm` rounds it: in bfloat16, halves are rounded away from zero."""
    if isinstance(weight, mx.array):
        return floats(weight)
    exact = dequantised(weight).astype(np.float32)
    if in_lanes:
        return exact.astype(np.float64)
    if dtype == mx.float16:
        return rounded(exact, dtype)
    bits = exact.view(np.uint32) + np.uint32(0x8000) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def activated(x: np.ndarray, gate: str) -> np.ndarray:
    if gate == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def check(
    x: mx.array,
    weight: Weight,
    plan: GemmPlan | None = None,
    gain: mx.array | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    gate: str | None = None,
) -> None:
    """The allowed error: half a step for each rounding, and a little for sums in float32."""
    norm = None if gain is None else RMSNorm(gain, EPS)
    how = {"norm": norm, "bias": bias, "residual": residual, "gate": gate}
    plan = plan or gemm_plan(len(x), shape_of(weight))
    got = skinny_gemm(x, weight, plan=plan, **how)
    assert got.dtype == x.dtype
    step, rows, w = HALF_A_STEP[x.dtype], floats(x), values(weight, x.dtype, plan.in_lanes)
    loose = np.zeros((len(rows), 1))  # one normalised element may be rounded the other way
    if gain is not None:
        exact = rows / np.sqrt((rows**2).mean(1, keepdims=True) + EPS)
        rows = rounded(rounded(exact, x.dtype) * floats(gain), x.dtype)
        loose = 2 * step * np.abs(rows).max(1, keepdims=True) * np.abs(w).max()
    expected = rows @ w.T
    allowed = 1e-4 + loose + step * np.abs(expected)
    if bias is not None:
        expected = expected + floats(bias)
        allowed = allowed + step * np.abs(expected)
    if gate:
        x, up = np.split(expected, 2, axis=1)
        expected = activated(x, gate) * up
        # silu is at most 1.1 times as steep as its argument, gelu 1.13 times.
        of_gate, of_up = np.split(allowed, 2, axis=1)
        allowed = 1.13 * of_gate * (np.abs(up) + of_up) + np.abs(x) * of_up
        allowed += 3 * step * np.abs(expected)
    if residual is not None:
        expected = expected + floats(residual)
        allowed = allowed + step * np.abs(expected)
    error = np.abs(floats(got) - expected)
    assert (error <= allowed).all(), (error / allowed).max()


def with_all(rows: int, outputs: int, depth: int, dtype: mx.Dtype, seed: int = 0) -> dict:
    """A gain, the bias of a gated product, and a residual of this number of columns."""
    rng = np.random.default_rng(seed + 1000)
    gain, residual = rng.standard_normal(depth), rng.standard_normal((rows, outputs))
    bias = rng.standard_normal(2 * outputs)
    arrays = {"gain": 1 + 0.3 * gain, "residual": 10 * residual, "bias": bias}
    return {k: mx.array(v.astype(np.float32)).astype(dtype) for k, v in arrays.items()}


GATES = st.sampled_from([None, "silu", "gelu_approx"])
NEIGHBOURS = st.sets(st.sampled_from(["gain", "bias", "residual"]))


@given(
    st.integers(1, MAX_ROWS),
    st.integers(1, 60),
    st.integers(1, 40),
    st.sampled_from([*[None] * 2 * len(READABLE), *READABLE]),
    st.sampled_from(DTYPES),
    NEIGHBOURS,
    GATES,
    st.integers(0, 99),
)
@settings(max_examples=48)
def test_random_shapes(rows, outputs, chunks, how, dtype, what, gate, seed):
    """The product alone; with a norm, a bias, a gate or a residual sum; and with all of them."""
    if how is not None:
        outputs, chunks = max(outputs, 8), -(-chunks // 4)
    depth = chunks * (32 if how is None else 64 if how.bits == 6 else max(32, how.group_size))
    x, weight = draw(rows, outputs * (2 if gate else 1), depth, dtype, seed)
    given = with_all(rows, outputs, depth, dtype, seed)
    given["bias"] = given["bias"][: len(weight)]
    if how is not None:
        weight = quantised((weight / depth**0.5).astype(dtype), how)
    elif what or gate:
        weight = (weight / chunks**0.5).astype(dtype)
    check(x, weight, gate=gate, **{name: given[name] for name in what})


# Quantised weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", READABLE, ids=str)
def test_every_quantisation(how, dtype):
    """Several loads in flight, a single one, and a last one of fewer chunks."""
    depth = 896 if how.group_size == 128 else 960
    x, weight = draw(11, 42, depth, dtype)
    check(x, quantised(weight, how))
    arrays = quantised(weight / 32, how), GemmPlan(2, 2, 4, 32)
    check(x, *arrays, gate="silu", **with_all(11, 21, depth, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", READABLE, ids=str)
def test_every_quantisation_of_few_rows(how, dtype):
    """Products in lanes, with several loads in flight, a single one, and a last one of fewer
    chunks."""
    depth = 896 if how.group_size == 128 else 960
    for rows, plan in ((1, GemmPlan(2, 2, 4, 32, True)), (3, GemmPlan(4, 1, 4, 16, True))):
        x, weight = draw(rows, 42, depth, dtype)
        check(x, quantised(weight, how), plan)
        check(x, quantised(weight / 32, how), plan, **with_all(rows, 21, depth, dtype), gate="silu")


@pytest.mark.parametrize("how", READABLE, ids=str)
def test_every_code_has_its_value(how):
    """If a row of x has one 1 and zeros, the product is a column of the weight, to the bit."""
    codes = 1 << how.bits
    rows, depth = (16, 16 * how.group_size) if codes == 16 else (codes, 4 * how.group_size)
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**32, (rows, depth * how.bits // 32), np.uint32)
    scales = rng.integers(100, 120, (rows, depth // how.group_size), np.uint8)
    biases = None
    if how.mode == "affine":
        scales = (scales / 64).astype(np.float32)
        biases = mx.array(scales - 1.5).astype(mx.bfloat16)
    scales = mx.array(scales).astype(mx.bfloat16 if how.mode == "affine" else mx.uint8)
    weight = QuantisedWeight(mx.array(words), scales, biases, how)
    for rows in (1, 5):  # in lanes, and with matrices
        expected = rounded(values(weight, mx.bfloat16, in_lanes=rows == 1), mx.bfloat16)
        for at in (0, 33, depth - 1):
            x = mx.zeros((rows, depth), mx.bfloat16)
            x[rows - 1, at] = 1
            got = floats(skinny_gemm(x, weight))[rows - 1]
            np.testing.assert_array_equal(got, expected[:, at])


def test_a_scale_of_nan_stays_in_its_row():
    x, weight = draw(9, 20, 256, mx.bfloat16)
    weight = quantised(weight, Quantisation(4, 64))
    weight.scales[7, 2] = np.nan
    assert (np.isnan(floats(skinny_gemm(x, weight))) == (np.arange(20) == 7)).all()


# Plans of gemm_plan; one that holds fewer rows than there are; and one of one SIMD group.
PLANS = [
    GemmPlan(8, 1), GemmPlan(8, 2), GemmPlan(8, 4), GemmPlan(16, 2), GemmPlan(16, 1),
    GemmPlan(1, 2), GemmPlan(3, 3), GemmPlan(8, 2, 1, 32),
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("rows", [5, 64])
def test_plans(rows, plan):
    check(*draw(rows, 150, 1120, mx.bfloat16), plan)
    x, weight = draw(rows, 150, 1120, mx.bfloat16)
    check(x, weight / 32, plan, **with_all(rows, 75, 1120, mx.bfloat16), gate="silu")


@pytest.mark.parametrize("rows", [9, 3], ids=["matrices", "lanes"])
def test_a_norm_is_the_one_that_mlx_computes(rows):
    """The bits equal those with a separate norm, because the same values are rounded."""
    x, weight = draw(rows, 40, 512, mx.bfloat16)
    weight = quantised(weight, Quantisation(4, 64))
    gain = with_all(rows, 40, 512, mx.bfloat16)["gain"]
    normed = mx.fast.rms_norm(x, gain, EPS)
    got = skinny_gemm(x, weight, norm=RMSNorm(gain, EPS))
    np.testing.assert_array_equal(floats(got), floats(skinny_gemm(normed, weight)))


def test_swiglu_is_the_one_that_mlx_computes():
    """The difference is at most a step of the result.  (In float16 MLX's own loses small results on
    a CPU.)"""
    x, weight = draw(9, 80, 512, mx.bfloat16)
    gate, up = mx.split(skinny_gemm(x, weight), 2, axis=1)
    got = floats(skinny_gemm(x, weight, gate="silu"))
    np.testing.assert_allclose(got, floats(gate * mx.sigmoid(gate) * up), rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("gate", ["silu", "gelu_approx"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_whose_exponentials_overflow(dtype, gate):
    x, weight = mx.ones((2, 32), dtype), mx.full((4, 32), 5.0, dtype)
    weight[0] = -5.0
    got = floats(skinny_gemm(x, weight, gate=gate))
    np.testing.assert_array_equal(got, [[0.0, 160.0**2]] * 2)


def test_the_plans_that_are_used_are_tried_here():
    used = {
        gemm_plan(rows, WeightShape(outputs, 1120))
        for rows in range(1, 65)
        for outputs in (100, 4096, 10**5)
    }
    assert used <= set(PLANS)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("rows", [5, 20, 64])
def test_plans_for_quantised_weights(rows, bits):
    """A weight of few outputs, by the plans for many and for few outputs, with short and long
    rows."""
    how = Quantisation(bits, 32)
    for depth in (64, 2048):
        x, weight = draw(rows, 40, depth, mx.bfloat16)
        weight = quantised(weight / 32, how)
        for plan in {gemm_plan(rows, WeightShape(n, depth, how)) for n in (100, 10**5)}:
            check(x, weight, plan)


def test_a_weight_of_many_rows():
    """The last threadgroup of gemm_plan is not full."""
    check(*draw(17, 4100, 64, mx.bfloat16))


def test_rows_do_not_touch_each_other():
    """A row of x and a row of the weight have NaN; the row that padding repeats has infinity."""
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
    """The memory after the rows, and after the weight, is NaN."""
    x, weight = draw(16, 24, 64, mx.bfloat16)
    few = quantised(weight, Quantisation(4, 32))
    expected = floats(skinny_gemm(x[4:9], weight[8:21]))
    of_few = floats(skinny_gemm(x[5:8], few))
    x[:4] = x[9:] = weight[:8] = weight[21:] = np.nan
    np.testing.assert_array_equal(floats(skinny_gemm(x[4:9], weight[8:21])), expected)
    x[4] = x[8] = np.nan
    np.testing.assert_array_equal(floats(skinny_gemm(x[5:8], few)), of_few)


def test_a_row_in_lanes_does_not_depend_on_the_others():
    """A row has the same bits alone and beside other rows, also if one of these is NaN."""
    x, weight = draw(4, 21, 960, mx.float16)
    weight = quantised(weight, Quantisation(8, 64))
    alone = [floats(skinny_gemm(x[i : i + 1], weight))[0] for i in range(4)]
    x[1, 7] = np.nan
    together = floats(skinny_gemm(x, weight))
    assert np.isnan(together[1]).all()
    np.testing.assert_array_equal(together[[0, 2, 3]], [alone[i] for i in (0, 2, 3)])


BAD = {
    "more rows than 64": ((65, 32), (8, 32), mx.float16, mx.float16),
    "half a chunk": ((2, 48), (8, 48), mx.float16, mx.float16),
    "float32": ((2, 32), (8, 32), mx.float32, mx.float32),
    "unlike types": ((2, 32), (8, 32), mx.float16, mx.bfloat16),
    "unlike depths": ((2, 32), (8, 64), mx.float16, mx.float16),
}
BAD_QUANTISED = {
    "3 bits": (Quantisation(3, 32), 64, mx.bfloat16, mx.bfloat16),
    "6 bits of half a load": (Quantisation(6, 32), 96, mx.bfloat16, mx.bfloat16),
    "scales of another type": (Quantisation(4, 32), 64, mx.bfloat16, mx.float16),
    "float32": (Quantisation(4, 32, "mxfp4"), 64, mx.float32, mx.bfloat16),
    "fewer scales than kernels take": (Quantisation(4, 64), 64, mx.bfloat16, mx.bfloat16),
}


@pytest.mark.parametrize("bad", BAD_QUANTISED)
def test_a_bad_quantised_weight_is_not_served(bad):
    how, depth, dtype, of_weight = BAD_QUANTISED[bad]
    x, weight = mx.ones((2, depth), dtype), quantised(mx.ones((7, depth), of_weight), how)
    assert not serves(x, weight)


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_named(bad):
    *shapes, dtype, other = BAD[bad]
    x, weight = mx.zeros(shapes[0], dtype), mx.zeros(shapes[1], other)
    if bad != "unlike depths":  # no layer has such a weight
        assert not serves(x, weight)
        return
    with pytest.raises(ValueError, match=r"x must be \(\d+, \d+\) .*, not \("):
        skinny_gemm(x, weight)


def test_bad_company_is_named():
    x, weight, gain = mx.zeros((2, 32), mx.float16), mx.zeros((8, 32), mx.float16), mx.zeros(32)
    with pytest.raises(ValueError, match=r"norm's weight must be \(32,\) mlx.core.float16, not"):
        skinny_gemm(x, weight, norm=RMSNorm(gain, EPS))
    with pytest.raises(ValueError, match=r"residual must be \(2, 4\) .* not \(2, 8\)"):
        skinny_gemm(x, weight, residual=mx.zeros((2, 8), mx.float16), gate="silu")
    with pytest.raises(ValueError, match=r"bias must be \(8,\) .* not \(4,\)"):
        skinny_gemm(x, weight, bias=mx.zeros(4, mx.float16))
