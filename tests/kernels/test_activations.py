"""metal/activations.h and the activations of experts, in float32 on the CPU host, against float64.

In 16 bits an error of a constant would hide behind rounding.
"""

import numpy as np
import pytest

from tests.support.host.launch import launch
from tests.support.kernels.expert_cases import GEGLU, OAI, RELU2, SWIGLU
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.values import activated
from vllm_metal_lite.kernels import source

X = np.concatenate([np.linspace(-6, 9, 300), [1e-30, -1e-30, 0.0, -0.0]]).astype(np.float32)
FUNCTIONS = {
    "exponential": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "softplus": lambda x: np.logaddexp(x, 0),
}


def on_host(call, *arrays, kernel="expert_gemm"):
    """The expression `call` for each element of a and b, with the functions of a kernel's
    header."""
    body = f"const uint i = thread_position_in_grid.x; out[i] = {call};"
    shape, header = arrays[0].shape, source.read(kernel)[0]
    inputs = [mx.array(array.astype(np.float32)) for array in arrays]
    grid = (len(arrays[0]), 1, 1), (32, 1, 1)
    return np.array(launch(body, inputs, (shape, mx.float32), *grid, header=header))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_number(name):
    # The argument of an exponential is rounded: an error of its size times 2^-24.
    np.testing.assert_allclose(on_host(f"{name}(a[i])", X), FUNCTIONS[name](X.astype(float)), 4e-6)
    assert np.isnan(on_host(f"{name}(a[i])", np.full(8, np.nan))).all()


def test_far_from_zero():
    far = np.array([-np.inf, -1e30, -200, 200, 1e30, np.inf, 0, 0])
    with np.errstate(over="ignore"):
        for name in ("exponential", "sigmoid", "softplus"):
            expected = FUNCTIONS[name](far).astype(np.float32)
            np.testing.assert_array_equal(on_host(f"{name}(a[i])", far), expected)


@pytest.mark.parametrize("activation", [SWIGLU, OAI, GEGLU], ids=lambda a: a.kind)
def test_activations_of_experts(activation):
    gate, up = X, np.roll(X, 77) * 2
    kind, alpha, limit = activation
    call = f"gated<float, {kind.upper()}>(a[i], b[i], float({alpha}), float({limit}))"
    got = on_host(call, gate, up)
    expected = activated(gate.astype(float), up.astype(float), activation)
    np.testing.assert_allclose(got, expected, 4e-6)


def test_a_squared_relu():
    got = on_host("squared_relu(a[i])", X)
    np.testing.assert_allclose(got, activated(X.astype(float), X, RELU2), 1e-6, 1e-40)
