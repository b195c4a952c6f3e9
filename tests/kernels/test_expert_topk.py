"""expert_topk on the CPU host, under the checker: experts as MLX sorts, weights as MLX rounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.arrays import rounded, seeded
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.expert_topk import MAX_EXPERTS, MAX_TOP_K, Routing, expert_topk, serves

pytestmark = pytest.mark.usefixtures("host")

SCORINGS, WEIGHTS = ["logits", "softmax", "sigmoid"], ["scores", "renormalized", "softmax"]


def logits_of(rows, experts, dtype=mx.float32, seed=0):
    """Logits with many equal values, negative values and both zeros."""
    values = np.round(np.random.default_rng(seed).standard_normal((rows, experts)) * 4) / 4
    return mx.array(values.astype(np.float32)).astype(dtype)


def by_mlx(logits, top_k, routing, dtype, bias=None, sum_dtype=mx.float32):
    """The operations of mlx-lm's routers; the sort keeps the order of equal scores."""
    scores = logits.astype(dtype)
    if routing.scoring == "softmax":
        scores = mx.softmax(scores, axis=-1, precise=True)
    elif routing.scoring == "sigmoid":
        scores = mx.sigmoid(scores)
    biased = scores if bias is None else (scores.astype(sum_dtype) + bias.astype(sum_dtype))
    order = np.array((biased if routing.late else -biased).astype(mx.float32))
    order = np.argsort(order, axis=-1, kind="stable")
    indices = mx.array(order[:, -top_k:] if routing.late else order[:, :top_k])
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if routing.weights == "renormalized":
        weights = weights / (weights.sum(axis=-1, keepdims=True) + routing.eps)
    elif routing.weights == "softmax":
        weights = mx.softmax(weights, axis=-1, precise=True)
    return np.array(indices), weights * routing.factor


def check(logits, top_k, routing, dtype=mx.float32, **how):
    indices, weights = expert_topk(logits, top_k, routing, dtype=dtype, **how)
    expected, of_mlx = by_mlx(logits, top_k, routing, dtype, **how)
    assert (indices.dtype, weights.dtype) == (mx.uint32, dtype)
    np.testing.assert_array_equal(np.array(indices), expected)
    steps = 2.5 * 2.0 ** -{mx.float32: 20, mx.float16: 10, mx.bfloat16: 7}[dtype]
    got, want = (np.array(w.astype(mx.float32)) for w in (weights, of_mlx))
    np.testing.assert_allclose(got, want, rtol=steps, atol=1e-7)


@given(
    st.integers(1, 9),
    st.sampled_from([8, 31, 32, 33, 64, 100]),
    st.integers(1, 8),
    st.sampled_from(SCORINGS),
    st.sampled_from(WEIGHTS),
    st.booleans(),
    st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    st.integers(0, 99),
)
@settings(max_examples=25)
def test_random_routers(rows, experts, top_k, scoring, weights, late, dtype, seed):
    routing = Routing(scoring, late, weights)
    if scoring == "logits" and weights == "renormalized":
        routing = routing._replace(weights="scores")  # the sum may be zero
    check(logits_of(rows, experts, dtype, seed), top_k, routing, dtype)


@pytest.mark.parametrize(
    ("experts", "top_k"), [(MAX_EXPERTS, 10), (512, 10), (128, MAX_TOP_K), (8, 8)]
)
def test_many_and_few_experts(experts, top_k):
    check(logits_of(3, experts), top_k, Routing("softmax", True, "renormalized"))


@pytest.mark.parametrize("sum_dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_bias_chooses_and_does_not_weigh(sum_dtype):
    bias = logits_of(1, 64, seed=9)[0] / 3
    routing = Routing("sigmoid", False, "renormalized", 1e-20, 2.5)
    check(logits_of(6, 64), 8, routing, bias=bias, sum_dtype=sum_dtype)


def test_eps_and_factor_are_rounded_as_mlx_rounds_numbers():
    routing = Routing("sigmoid", True, "renormalized", 0.3, 1.7)
    check(logits_of(6, 64, mx.bfloat16), 8, routing, mx.bfloat16)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_each_number_of_a_renormalized_weight_is_rounded(dtype):
    """The sum is rounded, too.  Sums of these logits are exact in float32; with eps, some are ties
    in 16 bits."""
    eps, factor = 0.390625 + 2**-14, 1.7
    logits = seeded(40, 64, seed=3, dtype=mx.bfloat16).astype(dtype) + 6
    indices, weights = expert_topk(logits, 8, Routing("logits", False, "renormalized", eps, factor))
    chosen = np.array(mx.take_along_axis(logits, indices, axis=-1).astype(mx.float32))
    eps, factor = rounded(np.array([eps, factor]), dtype)
    divisor = rounded(rounded(chosen.sum(-1, keepdims=True), dtype) + eps, dtype)
    expected = rounded(rounded(chosen / divisor, dtype) * factor, dtype)
    np.testing.assert_array_equal(np.array(weights.astype(mx.float32)), expected)


@pytest.mark.parametrize(("late", "expected"), [(False, [10, 3, 20]), (True, [3, 20, 10])])
def test_nan_is_larger_than_infinity(late, expected):
    logits = np.zeros((1, 40), np.float32)
    logits[0, [3, 20]], logits[0, 10] = np.inf, np.nan
    indices, _ = expert_topk(mx.array(logits), 3, Routing("logits", late))
    assert indices.tolist() == [expected]


@pytest.mark.parametrize("late", [False, True])
def test_both_zeros_are_equal(late):
    zeros = mx.where(logits_of(6, 40) < 0, -0.0, 0.0)
    check(zeros, 6, Routing("logits", late, "softmax"))
    check(mx.minimum(logits_of(6, 40), zeros), 6, Routing("logits", late, "softmax"))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_large_logits_do_not_overflow(dtype):
    logits = (logits_of(6, 40) * 8 + 300).astype(dtype)
    for scoring, weights in ("softmax", "renormalized"), ("logits", "softmax"):
        check(logits, 6, Routing(scoring, True, weights), dtype)


def test_every_row_has_different_experts_that_exist():
    logits = np.array(logits_of(5, 40))
    logits[0], logits[1], logits[2, 3:], logits[3] = np.nan, -np.inf, np.inf, 7
    for scoring in SCORINGS:
        indices = np.array(expert_topk(mx.array(logits), 6, Routing(scoring))[0])
        assert (indices < 40).all()
        assert all(len(set(row)) == 6 for row in indices.tolist())


def test_a_row_does_not_depend_on_the_others():
    logits = logits_of(7, 64)
    routing = Routing("softmax", True, "renormalized")
    together = [np.array(a) for a in expert_topk(logits, 4, routing)]
    alone = [np.array(a) for a in expert_topk(logits[5:6], 4, routing)]
    for all_rows, one in zip(together, alone, strict=True):
        np.testing.assert_array_equal(all_rows[5:6], one)


@pytest.mark.parametrize(
    ("logits", "top_k"),
    [
        (mx.zeros((2, MAX_EXPERTS + 1)), 2),
        (mx.zeros((2, 64)), MAX_TOP_K + 1),
        (mx.zeros((2, 8)), 9),
        (mx.zeros((2, 8)), 0),
        (mx.zeros((1, 4)), 2),
        (mx.zeros((2, 64), mx.int32), 2),
    ],
)
def test_what_is_not_served(logits, top_k):
    assert not serves(logits, top_k)


def test_a_bias_of_other_experts_is_refused():
    with pytest.raises(ValueError, match=r"bias must be \(64,\), not \(63,\)"):
        expert_topk(mx.zeros((2, 64)), 2, Routing("softmax"), bias=mx.zeros(63))
