"""gated_rms_norm on the CPU host, under the checker, against float64 and mlx-lm's layers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.nemotron_h import MambaRMSNormGated
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated

from tests.support.kernels.arrays import floats, normal
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm

pytestmark = pytest.mark.usefixtures("host_or_gpu")

# The largest relative error of one rounding to the type; for float32, eight times that, because
# sums are rounded too.
STEP = {mx.float32: 2**-21, mx.float16: 2**-11, mx.bfloat16: 2**-8}
EPS = 0.03  # so large that a test notices another eps


def check(rows, groups, dim, dtype, *, wide=False, gate_first=False, sigmoid=False, seed=0):
    """Check that the error is at most three roundings to the type, and that of float32 sums."""
    rng, width = np.random.default_rng(seed), groups * dim
    x = normal(rng, rows, groups, dim, dtype=dtype)
    joined = normal(rng, rows, width + 12, dtype=dtype)
    weight = normal(rng, width if wide else dim, dtype=dtype)
    y = gated_rms_norm(
        x, Columns(joined, 8), weight, EPS, dim=dim, gate_first=gate_first, sigmoid=sigmoid
    )
    assert (y.shape, y.dtype) == (x.shape, dtype)
    z = floats(joined)[:, 8 : 8 + width].reshape(x.shape)
    act = (1 if sigmoid else z) / (1 + np.exp(-z))
    gain, values = floats(weight).reshape(-1, dim), floats(x)
    values = values * act if gate_first else values
    expected = values / np.sqrt((values**2).mean(-1, keepdims=True) + EPS) * gain
    expected = expected if gate_first else expected * act
    np.testing.assert_allclose(floats(y), expected, 3.1 * STEP[dtype], 1e-6)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("sigmoid", [False, True], ids=["silu", "sigmoid"])
@pytest.mark.parametrize("gate_first", [False, True], ids=["norm first", "gate first"])
def test_orders_and_gates(gate_first, sigmoid, dtype):
    check(3, 5, 64, dtype, gate_first=gate_first, sigmoid=sigmoid)


@pytest.mark.parametrize("wide", [False, True], ids=["weights of a group", "of a row"])
@pytest.mark.parametrize(
    ("groups", "dim"), [(32, 128), (1, 8), (3, 9), (8, 1280), (1, 4096), (2, 5001), (4, 512)]
)
def test_groups_shorter_and_longer_than_a_simdgroup(groups, dim, wide):
    check(2, groups, dim, mx.bfloat16, wide=wide, gate_first=wide)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(8, 200),
    st.sampled_from(list(STEP)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=25)
def test_random_shapes(rows, groups, dim, dtype, wide, gate_first, seed):
    check(rows, groups, dim, dtype, wide=wide, gate_first=gate_first, seed=seed)


@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_the_same_as_qwen3_next_s_layer(dtype):
    """The bits are those of mlx-lm, except for rare elements: the order of the sum differs."""
    rng = np.random.default_rng(1)
    layer = Qwen3NextRMSNormGated(64, EPS)
    layer.weight = normal(rng, 64, dtype=dtype)
    x, z = (normal(rng, 5, 4, 64, dtype=dtype) for _ in "xz")
    y = gated_rms_norm(x, Columns(z.reshape(5, -1), 0), layer.weight, EPS, dim=64)
    theirs = layer(x, z)
    assert y.dtype == theirs.dtype
    np.testing.assert_allclose(floats(y), floats(theirs), 2 * STEP[dtype], 1e-6)
    if dtype != mx.float32:
        assert (floats(y) != floats(theirs)).mean() <= 0.02


@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_nearly_the_same_as_nemotron_h_s_layer(dtype):
    """mlx-lm also rounds SiLU."""
    rng = np.random.default_rng(1)
    layer = MambaRMSNormGated(256, EPS, group_size=64)
    layer.weight = normal(rng, 256, dtype=dtype)
    x, z = (normal(rng, 5, 256, dtype=dtype) for _ in "xz")
    y = gated_rms_norm(x, Columns(z, 0), layer.weight, EPS, dim=64, gate_first=True)
    np.testing.assert_allclose(floats(y), floats(layer(x, z)), 5 * STEP[dtype], 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": Columns(mx.zeros((3, 64)), 0)}, r"z is columns 0 to 64 of 2 rows .* \(3, 64\)"),
        ({"z": Columns(mx.zeros((2, 64)), 1)}, r"z is columns 1 to 65 of .* \(2, 64\)"),
        ({"dim": 24}, r"x must be \(2, 48\), not \(2, 64\)"),
        ({"weight": mx.zeros(32)}, r"weight must be \(64,\) mlx.core.float32, not \(32,\)"),
        ({"weight": mx.zeros(16, mx.float16)}, r"must be \(16,\) .*, not \(16,\) mlx.core.float16"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"x": mx.zeros((2, 4, 16)), "z": Columns(mx.zeros((2, 64)), 0)}
    arguments |= {"weight": mx.zeros(16), "eps": EPS, "dim": 16}
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**(arguments | change))
