"""One step through model, store, attention and sampler."""

import numpy as np
import pytest

from tests.support.engine.runner_bench import PROMPTS, RunnerBench
from tests.support.kernels.device import pretend_backend
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan
from vllm_metal_lite.attention.step_arrays import make_step
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_DRAFT, UNKNOWN_TOKEN
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.runner.runner import known_tokens, padded_rows


def step_of(batch, num_rows):
    return make_step(batch, num_rows, SdpaPlan(batch, num_rows))


@pytest.mark.parametrize("num_rows", [6, 8])
def test_unknown_tokens_are_taken_from_the_step_before(num_rows):
    """By seat: the order may differ, some requests have ended, and other rows know their tokens."""
    inputs = InputBatch(4, 16, 8)
    for i in range(4):
        inputs.add([i] * 2, 2)
        inputs.append_blocks(i, [i, i + 4])
    inputs.append_tokens(np.array([0, 2, 3]), np.full(3, UNKNOWN_TOKEN))
    inputs.token_ids[1] = range(20, 36)
    inputs.num_tokens[1] = 9
    seats, tokens = np.array([3, 0, 2]), mx.array([[13], [10], [12]])

    def known(req_indices, num_computed, num_scheduled):
        batch = inputs.pack(*map(np.array, (req_indices, num_computed, num_scheduled)))
        found = known_tokens(step_of(batch, num_rows), UNKNOWN_TOKEN, seats, tokens)
        assert found.shape == (num_rows,)
        return found[: batch.num_tokens].tolist()

    assert known([0, 3], [2, 2], [1, 1]) == [10, 13]
    assert known([3, 0, 2], [2, 2, 2], [1, 1, 1]) == [13, 10, 12]
    assert known([2, 0, 1], [2, 2, 3], [1, 1, 4]) == [12, 10, 23, 24, 25, 26]
    assert known([1], [3], [6]) == [*range(23, 29)]


def test_unknown_drafts_are_taken_by_seat_and_in_order():
    """A step may take fewer drafts than the device has, and may have drafts that are known."""
    inputs = InputBatch(4, 16, 8)
    for i in range(4):
        inputs.add([i] * 2, 2)
        inputs.append_blocks(i, [i, i + 4])
    drafts = [[], [UNKNOWN_DRAFT] * 3, [50], [UNKNOWN_DRAFT] * 2]
    lengths = [1 + len(draft) for draft in drafts]
    batch = inputs.pack(np.arange(4), np.ones(4, int), np.array(lengths), drafts=drafts)
    on_device = mx.array([[30, 31, 32], [10, 11, 12]])
    found = known_tokens(step_of(batch, 12), UNKNOWN_DRAFT, np.array([3, 1]), on_device)
    assert found[:10].tolist() == [0, 1, 10, 11, 12, 2, 50, 3, 30, 31]


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
