"""One step through model, store, attention and sampler."""

import numpy as np
import pytest

from tests.support.engine.runner_bench import PROMPTS, RunnerBench
from tests.support.kernels.device import pretend_backend
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan
from vllm_metal_lite.attention.step_arrays import make_step
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.runner.runner import known_tokens, padded_rows
from vllm_metal_lite.sampling.sampler import SamplerOutput


def step_of(batch, num_rows):
    return make_step(batch, num_rows, SdpaPlan(batch, num_rows))


@pytest.mark.parametrize("num_rows", [6, 8])
def test_unknown_tokens_are_taken_from_the_step_before(num_rows):
    """By seat: the order may differ, some requests have ended, and other rows know their tokens."""
    inputs = InputBatch(4, 16, 8)
    for i in range(4):
        inputs.add([i] * 2, 2)
        inputs.append_blocks(i, [i, i + 4])
    ones, tokens = np.array([1, 1]), mx.array([13, 10, 12])
    batch = inputs.pack(np.array([3, 0, 2]), np.zeros(3, int), np.full(3, 2))
    before = StepResult(batch, SamplerOutput(tokens, None, tokens))
    inputs.append_tokens(np.array([0, 2, 3]), np.full(3, UNKNOWN_TOKEN))
    batch = inputs.pack(np.array([0, 3]), 2 * ones, ones)
    assert known_tokens(step_of(batch, num_rows), before)[:2].tolist() == [10, 13]
    batch = inputs.pack(np.array([3, 0, 2]), np.full(3, 2), np.full(3, 1))
    known = known_tokens(step_of(batch, num_rows), before)
    assert known[:3].tolist() == [13, 10, 12]
    assert known.shape == (num_rows,)
    inputs.token_ids[1] = range(20, 36)
    inputs.num_tokens[1] = 9
    batch = inputs.pack(np.array([2, 0, 1]), np.array([2, 2, 3]), np.array([1, 1, 4]))
    known = known_tokens(step_of(batch, num_rows), before)
    assert known[:6].tolist() == [12, 10, 23, 24, 25, 26]
    batch = inputs.pack(np.array([1]), np.array([3]), np.array([6]))
    known = known_tokens(step_of(batch, num_rows), before)
    assert known[:6].tolist() == [*range(23, 29)]


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_greedy_tokens_equal_the_model_alone_with_and_without_padding_to_buckets(
    monkeypatch, where
):
    pretend_backend(monkeypatch, where)
    bench = RunnerBench(PROMPTS)
    tokens = [bench.step([0, 1], [0, 0], [20, 20]).token_ids.tolist()]
    for i in range(5):
        tokens.append(bench.step([0, 1], [20 + i] * 2, [1, 1]).token_ids.tolist())
    expected = [tiny.alone(tiny.native("llama"), p, 6) for p in PROMPTS]
    assert list(zip(*tokens, strict=True)) == [tuple(e) for e in expected]


def test_a_step_of_chunks_alone_samples_nothing():
    bench = RunnerBench(PROMPTS)
    result = bench.step([0, 1], [0, 0], [7, 12])
    assert result.token_ids.shape == (0,)
    assert result.logprobs is result.prompt_logprobs is None
    result = bench.step([0, 1], [7, 12], [13, 8])
    expected = [tiny.alone(tiny.native("llama"), p, 1)[0] for p in PROMPTS]
    assert result.token_ids.tolist() == expected


def test_a_batch_that_points_outside_the_store_is_refused():
    bench = RunnerBench(PROMPTS, num_blocks=9)
    with pytest.raises(ValueError, match="outside the store"):
        bench.step([0, 1], [0, 0], [20, 20])


def test_buckets_are_few_and_never_too_small(monkeypatch):
    assert [padded_rows(n) for n in (1, 63, 2048)] == [1, 63, 2048]  # a CPU pads nothing
    pretend_backend(monkeypatch, "metal")
    sizes = [padded_rows(n) for n in range(1, 4097)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 32
    assert all(size <= max(2 * n, n + 256) for n, size in enumerate(sizes, 1))
