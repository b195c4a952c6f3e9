"""add_rms_norm on the CPU host, under the checker, against MLX's own sum and norm and float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.arrays import floats, normal
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import add_rms_norm as module
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.arguments import RMSNorm

pytestmark = pytest.mark.usefixtures("host")

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
EPS = 0.03  # so large that a test notices another eps


def check(
    rows: int,
    dim: int,
    dtype: mx.Dtype,
    weight_dtype: mx.Dtype | None,
    seed: int = 0,
    post_norm: bool = False,
):
    """The sum has the bits of MLX; so has the norm in 16 bits, and in float32 nearly so.

    A different order of adding up squares moves a float32 by some 1e-7, and that moves a rare
    element of 16 bits to the neighbouring number.  Rounding elsewhere would move a quarter.
    """
    rng = np.random.default_rng(seed)
    x, y = (normal(rng, rows, dim, dtype=dtype) for _ in range(2))
    weight = None if weight_dtype is None else normal(rng, dim, dtype=weight_dtype)
    norm = None
    if post_norm:
        norm = RMSNorm(normal(rng, dim, dtype=dtype) if seed % 2 else None, 1e-2)
    added, normed = add_rms_norm(x, y, weight, EPS, norm)
    if norm is None:
        np.testing.assert_array_equal(floats(added), floats(x + y))
    else:
        if dtype != mx.float32:
            theirs = x + mx.fast.rms_norm(y, *norm)
            assert (floats(added) != floats(theirs)).mean() <= 0.02
        summand = _normed(y, *norm)
        step = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
        allowed = step * (1 + abs(floats(x)) + 2 * abs(summand))
        assert (abs(floats(added) - floats(x) - summand) <= allowed).all()
        x, y = added, mx.zeros_like(added)
    theirs = mx.fast.rms_norm(x + y, weight, EPS)
    assert normed.dtype == theirs.dtype
    if theirs.dtype != mx.float32:
        assert (floats(normed) != floats(theirs)).mean() <= 0.02
    exact = _normed(x + y, weight, EPS)
    step = 2 * {mx.float32: 2**-22, mx.float16: 2**-11, mx.bfloat16: 2**-8}[theirs.dtype]
    np.testing.assert_allclose(floats(normed), exact, step, 1e-6)


def _normed(x: mx.array, weight: mx.array | None, eps: float) -> np.ndarray:
    exact = floats(x)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + eps)
    return exact * (1 if weight is None else floats(weight))


@pytest.mark.parametrize("weight_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types(dtype, weight_dtype):
    check(3, 200, dtype, weight_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 9, 31, 128, 130, 1024, 1025, 2560, 4096, 4100, 5120])
def test_rows_shorter_and_longer_than_a_threadgroup(dim, dtype):
    """The launch works alone, and with a norm of the second summand, with and without a weight."""
    check(2, dim, dtype, dtype)
    for seed in (0, 1):
        check(2, dim, dtype, dtype, seed, post_norm=True)


@given(
    st.integers(1, 5),
    st.integers(8, 300),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
    st.booleans(),
)
@settings(max_examples=40)
def test_random_shapes(rows, dim, dtype, seed, post_norm):
    check(rows, dim, dtype, dtype, seed, post_norm)


@pytest.mark.parametrize(("dim", "threads"), [(12288, 1024), (12292, 512), (16384, 512)])
def test_a_long_row_has_fewer_threads(dim, threads, monkeypatch):
    """With 1,024 threads, Mesa's compiler for Apple's GPUs allows only 896 for a long row."""
    launch, asked = module._ADD_RMS_NORM, []
    spied = lambda *how: asked.append(how[3]) or launch(*how)  # noqa: E731
    monkeypatch.setattr(module, "_ADD_RMS_NORM", spied)
    check(2, dim, mx.bfloat16, mx.bfloat16, 1, post_norm=True)
    assert asked == [threads]


def test_a_sequence_axis_is_kept():
    rng = np.random.default_rng(0)
    x, y = normal(rng, 3, 1, 64), normal(rng, 3, 1, 64)
    for together, alone in zip(
        add_rms_norm(x, y, None, 0.1), add_rms_norm(x[:, 0], y[:, 0], None, 0.1), strict=True
    ):
        assert together.shape == (3, 1, 64)
        np.testing.assert_array_equal(floats(together)[:, 0], floats(alone))


def test_rows_do_not_touch_each_other():
    """One row is NaN; one is zeros, and eps keeps its norm finite.  Other rows are unaffected."""
    x = mx.array(np.array([[np.nan] * 40, [1.0] * 40, [0.0] * 40], np.float32))
    added, normed = add_rms_norm(x, x, None, 0.0025)
    assert mx.isnan(added[0]).all()
    assert mx.isnan(normed[0]).all()
    np.testing.assert_allclose(floats(normed[1]), 2 / np.sqrt(4.0025), 1e-6)
    assert not floats(normed[2]).any()


@pytest.mark.parametrize("other", [mx.ones((1, 16)), mx.ones((2, 16), mx.float16)])
def test_bad_input_is_named(other):
    with pytest.raises(ValueError, match=r"y must be \(2, 16\) mlx.core.float32, not \(\d, 16\)"):
        add_rms_norm(mx.ones((2, 16)), other, None, 1e-5)


def test_a_post_norm_of_another_type_is_refused():
    """The result of such a norm would not have the type of the rows."""
    x = mx.ones((2, 16), mx.float16)
    with pytest.raises(ValueError, match=r"post norm must be \(16,\) mlx.core.float16, not"):
        add_rms_norm(x, x, None, 1e-5, RMSNorm(mx.ones(16), 1e-5))
