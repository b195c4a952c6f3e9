"""Draws: their distribution; a seed gives the same draws in any batch."""

import numpy as np
import pytest

from tests.support.engine.sampling import (
    EOS,
    PROMPT,
    SEEDED,
    VOCAB,
    assert_fits,
    draw,
    drawn,
    make,
    random_logits,
    reference_keep,
    softmax,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling import logits as ops
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams

# The draw


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution(params):
    x = random_logits(11, 20, scale=1.5)
    counts = np.bincount(draw(make(params, range(2000), 20), x, 10).ravel(), minlength=20)
    keep = reference_keep(x.astype(np.float64), params)
    assert_fits(counts, softmax(np.where(keep, x / params.temperature, -np.inf)))


def test_steps_and_neighbouring_seeds_are_independent():
    tokens = draw(make(SamplingParams(), range(201), 4), np.zeros(4, np.float32), 101)
    for a, b in ((tokens[1:], tokens[:-1]), (tokens[:, 1:], tokens[:, :-1])):
        assert_fits(np.bincount((4 * a + b).ravel(), minlength=16), np.full(16, 1 / 16))


def test_masked_tokens_are_never_drawn_in_100_000():
    x = np.zeros(8, np.float32)
    x[[0, 2, 3, 7]] = -np.inf
    tokens = draw(make(SamplingParams(temperature=50.0), range(5000), 8), x, 20)
    assert set(tokens.ravel().tolist()) == {1, 4, 5, 6}
    params = SamplingParams(temperature=50.0, top_p=0.99, top_k=7, min_p=0.01)
    assert set(draw(make(params, range(500), 8), x, 4).ravel().tolist()) == {1, 4, 5, 6}


def test_noise_is_finite_for_the_extremes_of_random_bits():
    extremes = [0, 1, 255, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    bits = mx.array(np.array([extremes], np.uint32))
    noise = np.array(ops.perturb(mx.zeros(bits.shape), bits, mx.array([[1.0]])))[0]
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    assert 22 < noise[0] < 23
    assert -3 < noise[-1] < -2.7
    # A greedy row in a random batch takes none of it.
    assert not np.array(ops.perturb(mx.zeros(bits.shape), bits, mx.array([[0.0]]))).any()


@pytest.mark.parametrize(
    "temperature", [1.001e-5, 1e-3, 1e38, 1e300], ids=["least", "small", "large", "absurd"]
)
def test_extreme_temperatures(temperature):
    x = np.array([1.0, 3.0, -np.inf, 2.0], np.float32)
    for extra in ({}, {"top_p": 0.999, "min_p": 0.001, "top_k": 3}):
        tokens = drawn(SamplingParams(temperature=temperature, **extra), x, 100, 3)
        assert tokens == ({1} if temperature < 1 else {0, 1, 3})


def test_the_largest_penalty_and_bias_leave_a_finite_logit():
    params = SamplingParams(
        temperature=0, repetition_penalty=1e300, logit_bias=dict.fromkeys(range(4), -1e300)
    )
    sampler = make(params, [0], 4, np.arange(4))
    assert np.array(sampler(mx.zeros((1, 4)), np.array([0])).for_host).tolist() == [0]


# Seeds


def seeded_logits(step):
    """Rounded, so that ties are common, as with bfloat16 logits."""
    return random_logits(100 + step, VOCAB, scale=2.0).round(1)


def sampled(sampler, step):
    """The token of the first row."""
    return sampler(mx.array(seeded_logits(step)[None]), np.array([0])).token_ids


def alone(params=SEEDED):
    sampler = make(params, [1234], VOCAB, PROMPT)
    return [sampled(sampler, step).item() for step in range(12)]


NEIGHBOURS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.5, top_p=0.5),  # all of the row is sorted
    SamplingParams(top_k=2000),
    SamplingParams(min_p=0.2, presence_penalty=1.0),
    SamplingParams(top_k=3, logprobs=4),
    SamplingParams(top_k=20, top_p=0.9),
]


@pytest.mark.parametrize(
    "params",
    [SEEDED, SamplingParams(temperature=1.5), SamplingParams(temperature=2.0, min_p=0.01)],
    ids=["all", "temperature", "min_p"],
)
def test_stream_does_not_depend_on_the_batch(params):
    expected = alone(params)
    rng = np.random.default_rng(0)
    for trial in range(6):
        sampler = Sampler(8, VOCAB)
        mine = int(rng.integers(0, 8))
        sampler.add(mine, params, 1234, PROMPT, len(PROMPT), EOS)
        others = [int(r) for r in rng.permutation(8) if r != mine][: trial + 1]
        for i, row in enumerate(others):
            sampler.add(row, NEIGHBOURS[(i + trial) % 6], i, PROMPT, 4, EOS)
        for i, token in enumerate(expected):
            rows = rng.permutation([mine, *others[: rng.integers(0, len(others) + 1)]])
            if rng.random() < 0.3:  # a step in which this request has no token to sample
                sampler(mx.array(random_logits(i, len(others), VOCAB)), np.array(others))
            x = random_logits(i, len(rows), VOCAB)
            x[rows == mine] = seeded_logits(i)
            tokens = np.array(sampler(mx.array(x), rows).token_ids)
            assert tokens[rows == mine] == token


@pytest.mark.parametrize("cut", [1, 3, 4, 8])
def test_stream_survives_preemption(cut):
    expected = alone()
    sampler = make(SEEDED, [1234], VOCAB, PROMPT)
    for step in range(cut):
        sampled(sampler, step)
    sampler.remove(0)
    sampler.add(0, SamplingParams(presence_penalty=2.0), 9, PROMPT[:1], 1, EOS)
    sampled(sampler, 0)
    # The request comes back to its seat with all tokens that it had generated.
    known = np.array([*PROMPT, *expected[:cut]], np.int32)
    sampler.add(0, SEEDED, 1234, known, len(PROMPT), EOS)
    assert [sampled(sampler, step).item() for step in range(cut, 12)] == expected[cut:]


def test_a_step_may_be_built_before_the_last_one_is_evaluated():
    sampler = make(SEEDED, [1234], VOCAB, PROMPT)
    assert mx.concatenate([sampled(sampler, step) for step in range(12)]).tolist() == alone()


def test_seeds_of_64_bits_differ():
    x = np.zeros(50, np.float32)
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 2, -(2**63) + 5, 7]
    tokens = draw(make(SamplingParams(), seeds, 50), x, 30)
    assert len({tuple(t) for t in tokens.T}) == len(seeds)
    many = draw(make(SamplingParams(n=1024), range(1024), 50), x, 12)
    assert len({tuple(t) for t in many.T}) == 1024
    np.testing.assert_array_equal(
        draw(make(SamplingParams(), [-1], 50), x, 5),
        draw(make(SamplingParams(), [2**64 - 1], 50), x, 5),
    )
