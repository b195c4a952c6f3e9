"""Batched sampling against a plain reference: the rules, which tokens stay, odd logits, errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.sampling import (
    EMPTY,
    EOS,
    SEEDED,
    draw,
    drawn,
    make,
    random_logits,
    reference_scores,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import SamplingError
from vllm_metal_lite.sampling import logits as ops
from vllm_metal_lite.sampling.filters import Filters, thresholds
from vllm_metal_lite.sampling.sampler import Sampler, validate
from vllm_metal_lite.sampling_params import SamplingParams

# Every rule at once, in mixed batches

maybe = st.booleans()


@st.composite
def sampling_params(draw, vocab_size):
    def either(neutral, strategy):
        return draw(strategy) if draw(maybe) else neutral

    token = st.integers(0, vocab_size - 1)
    return SamplingParams(
        temperature=either(0.0, st.floats(0.05, 3)),
        top_k=either(0, st.integers(-1, 30) | st.integers(-1, vocab_size + 2)),
        top_p=either(1.0, st.floats(0.01, 1)),
        min_p=either(0.0, st.floats(0, 0.5)),
        repetition_penalty=either(1.0, st.floats(0.5, 2)),
        frequency_penalty=either(0.0, st.floats(-2, 2)),
        presence_penalty=either(0.0, st.floats(-2, 2)),
        logit_bias=either(None, st.dictionaries(token, st.floats(-20, 20), max_size=3)),
        stop_token_ids=either(None, st.lists(token, max_size=2)),
        min_tokens=either(0, st.integers(0, 5)),
        ignore_eos=draw(maybe),
    )


@settings(max_examples=120)
@given(st.data())
def test_mixed_batches_match_the_reference(data):
    vocab_size = data.draw(st.sampled_from([8, 65, 333, 4096]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    num_rows = data.draw(st.integers(1, 6))
    sampler = Sampler(num_rows + 2, vocab_size)
    requests = {}
    for row in rng.permutation(num_rows + 2)[:num_rows]:
        params = data.draw(sampling_params(vocab_size))
        seed = int(rng.integers(0, 2**63))
        prompt = rng.integers(0, vocab_size, rng.integers(1, 9))
        output = list(rng.integers(0, vocab_size, rng.integers(0, 4)))
        tokens = np.array([*prompt, *output], np.int32)
        sampler.add(int(row), params, seed, tokens, len(prompt), EOS)
        requests[int(row)] = (params, seed, prompt, output)
    for _ in range(4):
        rows = rng.permutation(list(requests))[: rng.integers(1, num_rows + 1)]
        raw = (rng.normal(size=(len(rows), vocab_size)) * 4).astype(np.float32)
        tokens = np.array(sampler(mx.array(raw), rows).token_ids)
        for x, row, token in zip(raw, rows, tokens, strict=True):
            params, seed, prompt, output = requests[row]
            scores = reference_scores(x, params, seed, prompt, output)
            # The token of the highest score, up to what float32 can tell apart.
            assert scores[token] >= scores.max() - 2e-5 * max(1, params.temperature)
            output.append(int(token))


# Greedy, masks, penalties


def test_greedy_is_argmax_and_a_tie_goes_to_the_lowest_id():
    x = random_logits(0, 5, 1000).round(0)
    x[4] = 1.0
    sampler = make(SamplingParams(temperature=0), range(5), 1000)
    tokens = np.array(sampler(mx.array(x), np.arange(5)).token_ids)
    assert (x == x.max(1, keepdims=True)).sum(1).max() > 1
    np.testing.assert_array_equal(tokens, x.argmax(1))


def test_penalty_state_is_updated_in_place():
    rows, vocab_size = 16, 50_000
    sampler = make(SamplingParams(temperature=0, repetition_penalty=1.1), range(rows), vocab_size)
    x = mx.array(random_logits(3, rows, vocab_size))
    for _ in range(3):
        tokens = sampler(x, np.arange(rows)).token_ids
        mx.eval(tokens)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(sampler.state[1])
        assert mx.get_peak_memory() - before < sampler.state[1].nbytes // 2


def test_token_ids_outside_the_vocabulary_are_harmless():
    params = SamplingParams(
        temperature=0, repetition_penalty=2.0, min_tokens=1, logit_bias={99: 5.0}
    )
    sampler = make(params, [0], 5, np.array([1, 400, -1]), np.array([2, 77]), eos=(500,))
    assert draw(sampler, np.array([0, 3, 2, 2, 1], np.float32), 1) == 3


# Top-k, top-p, min-p


def test_filters_keep_what_they_should():
    x = np.log(np.array([0.4, 0.05, 0.3, 0.05, 0.2], np.float32))
    hot = {"temperature": 1.0}
    assert drawn(SamplingParams(**hot), x) == {0, 1, 2, 3, 4}
    assert drawn(SamplingParams(**hot, top_k=2), x) == {0, 2}
    assert drawn(SamplingParams(**hot, top_k=-1), x) == {0, 1, 2, 3, 4}
    assert drawn(SamplingParams(**hot, top_p=0.6), x) == {0, 2}
    assert drawn(SamplingParams(**hot, top_p=0.75), x) == {0, 2, 4}
    assert drawn(SamplingParams(**hot, min_p=0.6), x) == {0, 2}
    # top_p counts what top_k and min_p have left: 0.4 / 0.7 is more than a half.
    assert drawn(SamplingParams(**hot, top_k=2, top_p=0.5), x) == {0}
    assert drawn(SamplingParams(**hot, min_p=0.6, top_p=0.5), x) == {0}
    assert drawn(SamplingParams(**hot, top_p=0.5), x) == {0, 2}
    # Temperature comes first: at 0.2 the best has 79 % of the mass.
    assert drawn(SamplingParams(temperature=0.2, top_p=0.75), x) == {0}
    assert drawn(SamplingParams(temperature=0.2, min_p=0.5), x) == {0}


def test_tokens_that_tie_at_the_threshold_are_kept():
    x = np.array([1.0, 2.0, 1.0, 0.0, 1.0], np.float32)
    assert drawn(SamplingParams(top_k=2), x) == {0, 1, 2, 4}
    assert drawn(SamplingParams(top_p=0.6), x) == {0, 1, 2, 4}


def test_top_p_weighs_exactly_k_of_the_tokens_that_tie_for_top_k():
    # The best token has 48 % of the best four, and much less of the 31 that tie for them.
    x = np.full(6400, -20, np.float32)
    x[np.arange(31) * 200] = 1.0
    x[0] = 2.0
    mine = SamplingParams(top_k=4, top_p=0.45)
    assert drawn(mine, x) == {0}
    # A neighbour that sorts more of them changes nothing.
    for neighbour in (SamplingParams(top_k=20), SamplingParams(top_p=0.5)):
        sampler = make(mine, range(50), len(x))
        sampler.add(7, neighbour, 0, EMPTY, 0, EOS)
        assert set(np.delete(draw(sampler, x, 10), 7, axis=1).ravel().tolist()) == {0}


def test_rows_without_filters_are_not_cut_by_those_of_a_neighbour():
    # The logits fall: a neighbour's top_k needs only the lowest ids, which are in a few blocks.
    x = np.linspace(1, 0, 6400).astype(np.float32)
    for neighbour in ({"top_k": 3}, {"top_k": 3, "top_p": 0.9}, {"top_p": 0.1}, {"min_p": 0.9}):
        sampler = make(SamplingParams(), range(60), len(x))
        sampler.add(7, SamplingParams(**neighbour), 7, EMPTY, 0, EOS)
        tokens = draw(sampler, x, 10)
        assert tokens[:, 7].max() < 1000
        assert np.delete(tokens, 7, axis=1).max() > 6000


@pytest.mark.parametrize("top_k", [0, 20])
def test_tiny_top_p_is_argmax(top_k):
    x = random_logits(5, 5000)
    for top_p in (1e-12, 1e-4):
        assert drawn(SamplingParams(top_p=top_p, top_k=top_k), x, 50, 2) == {int(x.argmax())}


def test_top_p_over_a_long_flat_tail():
    # Half of the mass in one token, the rest even over 100,000: top_p 0.75 keeps half of these.
    x = np.linspace(1e-3, 0, 100_001).astype(np.float32)
    x[0] = np.log(100_000)
    filters = Filters(len(x), 1)
    filters.add(0, SamplingParams(top_p=0.75))
    floor = thresholds(mx.array(x[None]), filters.of_rows(np.array([0]))[1])
    assert abs((x >= floor.item()).sum() - 50_000) < 50


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 20),
    st.sampled_from([10, 64, 700, 2560, 4001]),
    st.sampled_from([2, 30, 10**6]),
)
def test_candidates_hold_the_k_largest_lowest_ids_first(seed, k, vocab_size, levels):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, levels, (3, vocab_size)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = -np.inf
    values, ids = ops.candidates(mx.array(x), k)
    ids = np.broadcast_to(np.array(ids), values.shape)
    k = min(k, vocab_size)
    for row, value, token in zip(x, np.array(values), ids, strict=True):
        assert (np.diff(token) > 0).all()
        np.testing.assert_array_equal(value[token < vocab_size], row[token[token < vocab_size]])
        best = np.argsort(-row, kind="stable")[:k]
        assert set(best[row[best] > -np.inf]) <= set(token)


def test_a_small_top_k_sorts_little():
    assert ops.candidates(mx.zeros((2, 64_000)), 20)[0].shape == (2, 20 * 64)


# Odd logits

FILTERED = SamplingParams(top_k=5, top_p=0.9, min_p=0.05, presence_penalty=0.5)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(), SamplingParams(min_p=0.1), FILTERED],
    ids=["greedy", "temperature", "min_p", "filters"],
)
def test_bad_rows_fall_back_and_leave_the_others_alone(params):
    size = 1000
    x = random_logits(8, 6, size)
    good = np.array(make(params, range(6), size)(mx.array(x), np.arange(6)).token_ids)
    x[0], x[1], x[2, 5], x[3, 7] = np.nan, -np.inf, np.inf, np.nan
    x[3, 0] = x[4, 10:] = -np.inf
    tokens = np.array(make(params, range(6), size)(mx.array(x), np.arange(6)).token_ids)
    assert tokens[0] == tokens[1] == 0
    assert tokens[2] == 5
    assert x[3, tokens[3]] != -np.inf
    assert 0 <= tokens[4] < 10
    assert tokens[5] == good[5]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(logprobs=3), FILTERED, SEEDED],
    ids=["greedy", "temperature", "filters", "all"],
)
def test_narrow_logits_are_computed_in_float32(params, dtype):
    narrow = mx.array(random_logits(9, 4, 2000)).astype(dtype)
    rows = np.arange(4)
    low = make(params, range(4), 2000)(narrow, rows)
    wide = make(params, range(4), 2000)(narrow.astype(mx.float32), rows)
    assert low.token_ids.dtype == mx.int32
    assert low.token_ids.tolist() == wide.token_ids.tolist()
    if params.logprobs is not None:
        assert low.logprobs.logprobs.dtype == mx.float32
        assert low.logprobs.logprobs.tolist() == wide.logprobs.logprobs.tolist()


def test_top_p_of_bfloat16_logits_is_computed_in_float32():
    # 3000 tokens that have 0.505 of the mass, but 0.502 if 15/1024 - 8 were rounded to bfloat16.
    x = np.full((40, 3001), 15 / 1024, np.float32)
    x[:, 0] = 8
    sampler = make(SamplingParams(top_p=1 - 0.5035), range(40), 3001)
    tokens = np.array(sampler(mx.array(x).astype(mx.bfloat16), np.arange(40)).token_ids)
    assert 5 < (tokens > 0).sum() < 35


# Errors


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"logit_bias": {5: 1.0, 100: 1.0}}, "logit_bias .* 100, got 100"),
        ({"stop_token_ids": [1, 100]}, "stop_token_ids .* 100, got 100"),
        ({"allowed_token_ids": [1, 100]}, "allowed_token_ids .* 100, got 100"),
        ({"thinking": {"start": [9], "end": [3, 100]}}, "thinking .* 100, got 100"),
        ({"prompt_logprobs": 101}, "prompt_logprobs .* 100, got 101"),
    ],
)
def test_validate_names_value_and_limit(kw, message):
    with pytest.raises(SamplingError, match=message):
        validate(SamplingParams(**kw), 100)
    validate(SamplingParams(**kw), 101)
    validate(SamplingParams(), 1)
