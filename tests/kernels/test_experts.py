"""The kernels of mixtures of experts on the CPU host, under the checker, against float64, rounded
where mlx-lm's operations round."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.arrays import floats, normal
from tests.support.kernels.expert_cases import (
    GEGLU,
    OAI,
    RELU2,
    SWIGLU,
    allowed_and_expected,
    draw_experts,
    indices_of,
    plan_of,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.values import activated
from vllm_metal_lite.kernels import experts as module
from vllm_metal_lite.kernels.experts import (
    MAX_ROWS,
    Experts,
    ExpertWeight,
    expert_mlp,
    expert_product,
    expert_sum,
    experts_problem,
    most_tiles,
    plan_experts,
    serves,
)
from vllm_metal_lite.kernels.skinny_gemm import GemmPlan
from vllm_metal_lite.kernels.weight_formats import READABLE
from vllm_metal_lite.specs import Quantisation

pytestmark = pytest.mark.usefixtures("host")

DTYPES = [mx.float16, mx.bfloat16]


def rows_of(count: int, hidden: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    return normal(np.random.default_rng(seed), count, hidden, dtype=dtype)


def check(x: mx.array, indices: np.ndarray, experts: Experts) -> mx.array:
    got = expert_mlp(x, mx.array(indices), experts)
    assert got.dtype == x.dtype
    allowed, expected = allowed_and_expected(x, indices, experts)
    error = np.abs(floats(got) - expected)
    assert (error <= allowed).all(), (error / allowed).max()
    return got


# The plan


# One case has fewer pairs than threadgroup memory holds at once, the other has more.
MANY_ROWS = 200


@given(st.integers(2, MANY_ROWS), st.integers(1, 8), st.sampled_from([8, 13, 64, 300]), st.data())
@settings(max_examples=25)
def test_a_plan_has_each_pair_once_by_expert(rows, top_k, num_experts, data):
    top_k = min(top_k, num_experts)
    indices = indices_of(rows, top_k, num_experts, data.draw(st.integers(0, 99)), skew=True)
    num_live = data.draw(st.integers(1, rows))
    plan = plan_experts(mx.array(indices), num_experts, mx.array([num_live], mx.int32))
    expected = plan_of(indices, num_experts, plan.tile, num_live)
    np.testing.assert_array_equal(np.array(plan.array), np.array(expected.array))
    assert plan.num_tiles == expected.num_tiles


@given(st.lists(st.integers(0, 70), min_size=1, max_size=40), st.sampled_from([8, 16, 32]))
def test_there_is_room_for_all_tiles(counts, tile):
    needed = sum(-(-count // tile) for count in counts)
    num_experts = len(counts) - 1  # the last count is that of padding
    assert needed <= most_tiles(sum(counts), num_experts, tile)


def test_a_plan_of_one_row_is_a_constant():
    plan = plan_experts(mx.array([[5, 0, 3]]), 8)
    np.testing.assert_array_equal(np.array(plan.array)[:9], [0, 1, 2, 0, 1, 1, 1, 2, 1])
    assert plan is not plan_experts(mx.array([[1, 4, 2]]), 8)
    assert plan.array is plan_experts(mx.array([[1, 4, 2]]), 8).array


# The products


@given(
    st.integers(1, 80),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(DTYPES),
    st.sampled_from([SWIGLU, OAI, GEGLU, RELU2]),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=10)
def test_random_shapes(rows, top_k, hidden, inner, dtype, activation, bias, seed):
    hidden, inner = 32 * hidden, 32 * inner
    experts = draw_experts(6, hidden, inner, dtype, activation=activation, bias=bias, seed=seed)
    check(rows_of(rows, hidden, dtype, seed), indices_of(rows, top_k, 6, seed), experts)


@pytest.mark.parametrize("how", READABLE, ids=str)
def test_every_quantisation(how, monkeypatch):
    """Several loads in flight, a single one, and a last one of fewer chunks; with gpt-oss's
    activation and biases."""
    hidden, inner = (640, 128) if how.group_size == 128 else (704, 64)
    experts = draw_experts(2, hidden, inner, mx.bfloat16, how, OAI, bias=True)
    plan, of_down = GemmPlan(2, 2, 4), module.product_plan

    def by_depth(tile, weight):
        return plan if weight.depth == hidden else of_down(tile, weight)

    monkeypatch.setattr(module, "product_plan", by_depth)
    check(rows_of(5, hidden, mx.bfloat16), indices_of(5, 1, 2, 1), experts)


def test_gelu_gates():
    """The values cover the bend of gelu, and arguments where its tanh is 1 to the last bit."""
    experts = draw_experts(3, 64, 64, mx.bfloat16, activation=GEGLU, bias=True)
    x = rows_of(9, 64, mx.bfloat16) * mx.array([0.01, 0.3, 1, 3, 9] * 2)[:9, None]
    check(x.astype(mx.bfloat16), indices_of(9, 2, 3, 0), experts)


def test_a_squared_relu_has_no_gate():
    """Both kinds of products, in lanes and by matrices.  A NaN stays in its row."""
    for rows, how in ((3, Quantisation(4, 32)), (9, None)):
        experts = draw_experts(3, 64, 96, mx.bfloat16, how, RELU2, bias=True)
        x, indices = rows_of(rows, 64, mx.bfloat16), indices_of(rows, 2, 3, 0)
        check(x, indices, experts)
        x[2, 5] = np.nan
        got = floats(expert_mlp(x, mx.array(indices), experts)).reshape(rows, -1)
        wrong = np.arange(rows) == 2
        assert (wrong == np.isnan(got).T).all()


@pytest.mark.parametrize("how", [Quantisation(4, 64), Quantisation(4, 32, "mxfp4")], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 20])
def test_quantised_experts(rows, how):
    experts = draw_experts(5, 192, 128, mx.bfloat16, how)
    check(rows_of(rows, 192, mx.bfloat16), indices_of(rows, 2, 5, rows), experts)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_few_rows_of_one_quantised_expert(rows):
    """A tile of this number of rows is multiplied without matrix instructions."""
    experts = draw_experts(5, 192, 128, mx.bfloat16, Quantisation(4, 64))
    check(rows_of(rows, 192, mx.bfloat16), np.full((rows, 1), 3), experts)


@pytest.mark.parametrize("activation", [SWIGLU, OAI, GEGLU, RELU2], ids=lambda a: a.kind)
def test_activations_of_exact_products(activation):
    """Products by an identity are exact: the activation alone is rounded, relative to its size, and
    the argument of an exponential that is small relative to that."""
    x = mx.array(np.linspace(-7, 9, 32 * 64).reshape(32, 64)).astype(mx.float16)
    same, up = (ExpertWeight(mx.eye(64, dtype=mx.float16)[None]) for _ in range(2))
    pairs = mx.zeros((32,), mx.uint32)
    plan, up = plan_experts(pairs[:, None], 1), None if activation == RELU2 else up
    got = expert_product(x, pairs, plan, same, up=up, activation=activation)
    expected = activated(floats(x), floats(x), activation)
    steps = 4 + np.maximum(-activation.alpha * floats(x), 0)
    assert (np.abs(floats(got) - expected) <= steps * 2**-11 * np.abs(expected) + 1e-6).all()


@pytest.mark.parametrize("rows", [3, 40, 64])
def test_all_rows_have_one_expert(rows):
    """An expert has several full tiles, and one that is not full."""
    experts = draw_experts(9, 64, 96, mx.bfloat16)
    check(rows_of(rows, 64, mx.bfloat16), np.full((rows, 1), 8), experts)


@pytest.mark.parametrize("plan", [GemmPlan(8, 1), GemmPlan(4, 4), GemmPlan(1, 2), GemmPlan(3, 3)])
def test_plans(plan, monkeypatch):
    monkeypatch.setattr(module, "product_plan", lambda *_: plan)
    experts = draw_experts(4, 1120, 32, mx.bfloat16)
    check(rows_of(33, 1120, mx.bfloat16), indices_of(33, 1, 4, 0), experts)


def test_a_row_does_not_depend_on_the_others():
    """A pair has the same bits alone and beside other pairs of its tile, in any order.  A NaN stays
    in its row."""
    experts = draw_experts(4, 160, 64, mx.bfloat16)
    x, indices = rows_of(30, 160, mx.bfloat16), indices_of(30, 3, 4, 0)
    together = floats(check(x, indices, experts)).reshape(30, 3, -1)
    for row in (0, 17):
        alone = floats(expert_mlp(x[row : row + 1], mx.array(indices[row : row + 1]), experts))
        np.testing.assert_array_equal(together[row], alone)
    back = floats(expert_mlp(x[::-1], mx.array(indices[::-1].copy()), experts))
    np.testing.assert_array_equal(back.reshape(30, 3, -1)[::-1], together)
    x[7, 3] = np.nan
    got = floats(expert_mlp(x, mx.array(indices), experts)).reshape(30, 3, -1)
    np.testing.assert_array_equal(np.isnan(got).all((1, 2)), np.arange(30) == 7)
    np.testing.assert_array_equal(np.delete(got, 7, 0), np.delete(together, 7, 0))


def test_an_expert_that_no_row_has_is_not_read():
    experts = draw_experts(4, 64, 64, mx.bfloat16)
    for part in experts.parts:
        part.weight[2] = np.nan
    x = rows_of(12, 64, mx.bfloat16)
    got = expert_mlp(x, mx.array(np.array([[0, 3]] * 6 + [[3, 1]] * 6)), experts)
    assert np.isfinite(floats(got)).all()


@pytest.mark.parametrize(("rows", "num_live"), [(8, 3), (64, 33)])
def test_padding_reads_no_expert(rows, num_live):
    """Live rows have the bits that they have without padding; padding rows are zero."""
    experts = draw_experts(6, 64, 96, mx.bfloat16)
    x, indices = rows_of(rows, 64, mx.bfloat16), indices_of(rows, 2, 5, 0)
    indices[num_live:] = 5, 4
    for part in experts.parts:
        part.weight[5] = np.nan
    x[num_live:] = np.nan
    expected = floats(expert_mlp(x[:num_live], mx.array(indices[:num_live]), experts))
    live = mx.array([num_live], mx.int32)
    got = floats(expert_mlp(x, mx.array(indices), experts, num_live=live))
    np.testing.assert_array_equal(got[: 2 * num_live], expected)
    np.testing.assert_array_equal(got[2 * num_live :], 0)


# The sum


@pytest.mark.parametrize("weights_dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "top_k", "columns"), [(1, 1, 4), (5, 8, 132), (64, 4, 2056)])
def test_weighted_sums(rows, top_k, columns, weights_dtype):
    x = rows_of(rows * top_k, columns, mx.bfloat16)
    weights = mx.softmax(rows_of(rows, top_k, mx.float32, 1), axis=-1).astype(weights_dtype)
    product = x.reshape(rows, top_k, columns) * weights[..., None]
    expected = floats(product).sum(1)
    got = expert_sum(x, weights)
    assert got.dtype == product.dtype
    step = 2**-8 if product.dtype == mx.bfloat16 else 2**-22
    np.testing.assert_allclose(floats(got), expected, rtol=step, atol=1e-6)
    if weights_dtype == mx.float32:
        again = expert_sum(x, weights, mx.bfloat16)
        np.testing.assert_array_equal(floats(again), floats(got.astype(mx.bfloat16)))


# What is not served


def test_what_is_not_served_is_named():
    experts = draw_experts(4, 64, 64, mx.bfloat16)
    x, indices = rows_of(5, 64, mx.bfloat16), mx.zeros((5, 2), mx.uint32)
    assert serves(x, indices, experts)
    many = MAX_ROWS + 1
    assert not serves(mx.zeros((many, 64), mx.bfloat16), mx.zeros((many, 2), mx.uint32), experts)
    assert not serves(x.astype(mx.float16), indices, experts)
    odd = replace(experts, down=experts.gate._replace(weight=experts.gate.weight[:, :40]))
    assert "do not fit each other" in (experts_problem(odd) or "")
    biased = replace(experts, up=ExpertWeight(experts.up.weight, mx.zeros((4, 64), mx.bfloat16)))
    assert "differ in type, quantisation or bias" in (experts_problem(biased) or "")
    three = draw_experts(4, 64, 64, mx.bfloat16, Quantisation(3, 64))
    assert re.search("do not read .* 3 bits in groups of 64", experts_problem(three) or "")
    with pytest.raises(ValueError, match=r"x must be \(10, 8\), not \(9, 8\)"):
        expert_sum(mx.zeros((9, 8)), mx.zeros((5, 2)))
    with pytest.raises(ValueError, match=r"x must be \(10, 8\), not \(10, 10\)"):
        expert_sum(mx.zeros((10, 10)), mx.zeros((5, 2)))
