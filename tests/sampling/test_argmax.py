"""argmax in parts is mx.argmax, and is taken where it pays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.sampling import make
from tests.support.kernels.launches import Stubs
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling import logits as ops
from vllm_metal_lite.sampling_params import SamplingParams

QWEN3 = 151_936


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_the_first_of_the_largest_whatever_the_parts(data):
    """As numpy's: few distinct values, so that ids tie within parts and between them."""
    parts, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 97))
    rows = data.draw(st.sampled_from([1, 2, 3, 17]))
    dtype = data.draw(st.sampled_from([mx.float32, mx.float16, mx.bfloat16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = rng.integers(-2, data.draw(st.sampled_from([-1, 1, 99])), (rows, parts * size))
    x = x.astype(np.float32)
    x[rng.random(x.shape) < data.draw(st.sampled_from([0, 0.5, 0.99, 1]))] = -np.inf
    x[rng.random(x.shape) < data.draw(st.sampled_from([0, 0.01]))] = np.inf
    got = ops.argmax_in_parts(mx.array(x).astype(dtype), parts)
    assert (got.shape, got.dtype) == ((rows,), mx.uint32)
    np.testing.assert_array_equal(got, x.argmax(1))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(2, 50), st.integers(0, 2**32))
def test_nan_is_passed_over_as_by_mlx(parts, size, seed):
    """On a CPU unless a part begins with it."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 5, (4, parts, size)).astype(np.float32)
    x[:, :, 1:][rng.random((4, parts, size - 1)) < rng.choice([0.1, 0.9, 1])] = np.nan
    x = mx.array(x.reshape(4, -1))
    assert mx.array_equal(ops.argmax_in_parts(x, parts), mx.argmax(x, -1))


@pytest.mark.parametrize(
    ("on_cpu", "vocab_size", "launches"), [(True, QWEN3, 1), (False, 1000, 1), (False, QWEN3, 5)]
)
def test_what_greedy_sampling_launches(monkeypatch, on_cpu, vocab_size, launches):
    stubs = Stubs(monkeypatch)
    x = mx.zeros((16, vocab_size), mx.bfloat16)
    mx.eval(x)
    sampler = make(SamplingParams(temperature=0), range(16), vocab_size)
    monkeypatch.setattr(backend, "is_cpu", lambda: on_cpu)
    needed = stubs.needed(sampler(x, np.arange(16)).token_ids)
    needed.pop("View", None)  # as int32: launches nothing
    assert sum(needed.values()) == launches
    assert needed["ArgReduce"] == (2 if launches > 1 else 1)
