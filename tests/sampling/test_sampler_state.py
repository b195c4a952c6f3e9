"""A step that fails is sampled again: a call can be taken back."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling.processors import Drafts
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams

VOCAB = 50
PARAMS = [
    SamplingParams(seed=1, frequency_penalty=2.0, repetition_penalty=1.5),
    SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[7]),
    SamplingParams(temperature=0, bad_words=["x"]),
]
BAD_WORDS = [[], [], [[3, 4]]]


def sampled(take_back: bool) -> list[list[int]]:
    sampler, rows = Sampler(4, VOCAB), np.arange(len(PARAMS))
    for row, (params, words) in enumerate(zip(PARAMS, BAD_WORDS, strict=True)):
        sampler.add(row, params, row, np.array([1, 2]), 2, (), words)
    rng, tokens = np.random.default_rng(0), []
    for _ in range(6):
        logits = rng.standard_normal((len(PARAMS), VOCAB)).astype(np.float32)
        logits[1, 7] += 5  # would stop
        logits[2, [3, 4]] += [5 * (len(tokens) % 2 == 0), 5 * (len(tokens) % 2)]  # the bad word
        if take_back:
            before = sampler.state
            sampler(mx.array(-logits), rows)
            sampler.state = before
        tokens.append(sampler(mx.array(logits), rows).token_ids.tolist())
    return tokens


def test_a_call_that_is_taken_back_leaves_nothing():
    expected = sampled(take_back=False)
    assert sampled(take_back=True) == expected
    assert any(row[1] == 7 for row in expected)
    assert expected[0][2] == 3
    assert expected[1][2] != 4


def test_a_seat_that_drew_nothing_ends_without_a_new_upload_for_the_others():
    sampler, logits = Sampler(4, VOCAB), mx.zeros((1, VOCAB))
    sampler.add(0, PARAMS[0], 0, np.array([1, 2]), 2, ())
    sampler(logits, np.array([0]))
    before = sampler._metadata
    sampler.remove(3)
    sampler(logits, np.array([0]))
    assert sampler._metadata is before
    sampler.remove(0)
    sampler.add(0, PARAMS[1], 0, np.array([1, 2]), 2, ())
    sampler(logits, np.array([0]))
    assert sampler._metadata is not before


def test_rejected_drafts_do_not_count_for_the_noise():
    sampler, rows = Sampler(4, VOCAB), np.arange(3)
    for row in range(3):
        sampler.add(row, SamplingParams(), row, np.array([1, 2]), 2, ())
    logits, none = mx.zeros((3, VOCAB)), np.zeros((3, 0), np.int32)
    counted = sampler(logits, rows, None, Drafts(np.array([1, 2, 0]), none)).token_ids
    rejected = mx.array([2, 0, 1])
    found = sampler(logits, rows, None, Drafts(np.array([3, 2, 1]), none, rejected)).token_ids
    assert found.tolist() == counted.tolist()
