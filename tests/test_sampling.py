"""Batched sampling against a plain reference: float64, one row at a time, noise by hand."""

import math
import re
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal_lite import backend
from vllm_metal_lite import logits as ops
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import SamplingError
from vllm_metal_lite.sampling import Sampler, prompt_logprobs, validate
from vllm_metal_lite.sampling_params import SamplingParams

EOS = (3,)
EMPTY = np.zeros(0, np.int32)


# --- reference -----------------------------------------------------------------------------------


def reference_penalized(raw, params, prompt, output, eos=EOS):
    x = raw.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        stops = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos)]
        x[[t for t in stops if t < len(x)]] = -np.inf
    counts = np.bincount(np.asarray(output, int), minlength=len(x))
    seen = counts > 0
    seen[np.asarray(prompt, int)] = True
    r = params.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def reference_keep(x, params):
    """Which tokens may be drawn, by sorting and un-sorting as the textbook does it."""
    z = x / params.temperature
    z = z - z.max()
    z[np.exp(z) < params.min_p] = -np.inf
    order = np.argsort(-z, kind="stable")
    if 0 < params.top_k < len(x):
        z[order[params.top_k :]] = -np.inf
    p = np.exp(z) / np.exp(z).sum()
    mass_before = np.cumsum(p[order]) - p[order]
    drop = order[mass_before >= params.top_p]
    z[drop[drop != order[0]]] = -np.inf
    return z > -np.inf


def splitmix64(z):
    m = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & m
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & m
    return z ^ (z >> 31)


def reference_noise(seed, step, vocab_size):
    golden, m = 0x9E3779B97F4A7C15, 2**64 - 1
    key = splitmix64((splitmix64((seed + golden) & m) + step * golden) & m)
    key = mx.array(np.array([key & 0xFFFFFFFF, key >> 32], np.uint32))
    bits = np.array(mx.random.split(key, -(-vocab_size // 2))).ravel()[:vocab_size]
    return -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))


def reference_scores(raw, params, seed, prompt, output, eos=EOS):
    x = reference_penalized(raw, params, prompt, output, eos)
    if params.greedy:
        return x
    x = np.where(reference_keep(x, params), x, -np.inf)
    return x + params.temperature * reference_noise(seed, len(output), len(x))


# --- helpers -------------------------------------------------------------------------------------


def make(params, seeds, vocab_size, prompt=EMPTY, output=EMPTY, eos=EOS):
    """A sampler with a row for every seed."""
    sampler = Sampler(len(seeds), vocab_size)
    tokens = np.concatenate([prompt, output]).astype(np.int32)
    for i, seed in enumerate(seeds):
        sampler.add(i, params, seed, tokens, len(prompt), eos)
    return sampler


def draw(sampler, logits, steps):
    """(steps, rows) tokens, every row from the same logits (V,)."""
    rows = np.arange(sampler.max_num_seqs)
    x = mx.broadcast_to(mx.array(logits), (len(rows), len(logits)))
    out = [sampler(x, rows).token_ids for _ in range(steps)]
    return np.array(mx.stack(out))


def random_logits(seed, *shape, scale=3.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def primitives(path, *arrays):
    mx.export_to_dot(str(path), *arrays)
    return re.findall(r'label ?= ?"([^"]+)", shape ?= ?rectangle', path.read_text())


def chi_square(counts, probs):
    expected = probs * counts.sum()
    assert counts[probs == 0].sum() == 0
    expected, counts = expected[probs > 0], counts[probs > 0]
    return ((counts - expected) ** 2 / expected).sum(), len(expected) - 1


def assert_fits(counts, probs):
    stat, df = chi_square(counts, probs)
    # Wilson and Hilferty: the cube root is nearly normal; 3.1 sigma is p = 0.001.
    z = ((stat / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    assert z < 3.1, f"chi-square {stat:.1f} at {df} degrees of freedom"


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


# --- every rule at once, in mixed batches --------------------------------------------------------

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


@settings(max_examples=300, deadline=None, derandomize=True)
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


# --- greedy, masks, penalties --------------------------------------------------------------------


def test_greedy_is_argmax_and_a_tie_goes_to_the_lowest_id():
    x = random_logits(0, 5, 1000).round(0)
    x[4] = 1.0
    sampler = make(SamplingParams(temperature=0), range(5), 1000)
    tokens = np.array(sampler(mx.array(x), np.arange(5)).token_ids)
    assert (x == x.max(1, keepdims=True)).sum(1).max() > 1
    np.testing.assert_array_equal(tokens, x.argmax(1))


def test_greedy_row_is_greedy_among_random_rows():
    x = random_logits(1, 4, 500).round(1)
    sampler = make(SamplingParams(temperature=2.0, top_p=0.9), range(4), 500)
    sampler.add(2, SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.5), 2, EMPTY, 0, EOS)
    for _ in range(20):
        assert np.array(sampler(mx.array(x), np.arange(4)).token_ids)[2] == x[2].argmax()


def test_repetition_penalty_by_sign_over_prompt_and_output():
    x = np.array([4.0, -1.0, 3.0, -1.5, 3.5], np.float32)
    # 0 seen in the prompt: 4 / 2; 4 generated: 3.5 / 2; so 2 wins.
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert draw(make(params, [0], 5, np.array([0]), np.array([4])), x, 1) == 2
    # Below 0 it is multiplied: -1 becomes -2, so 3 wins.
    y = np.array([-9.0, -1.0, -9.0, -1.5, -9.0], np.float32)
    assert draw(make(params, [0], 5, np.array([1])), y, 1) == 3


def test_frequency_and_presence_count_generated_tokens_only():
    x = np.array([2.0, 1.0, 0.0], np.float32)
    steps = 6
    frequency = SamplingParams(temperature=0, frequency_penalty=0.6)
    presence = SamplingParams(temperature=0, presence_penalty=1.5)
    prompt = np.array([0, 0, 0, 0])
    # 0 falls by 0.6 each time it is generated: 2, 1.4, 0.8 | 1, 0.4 ...
    assert draw(make(frequency, [0], 3, prompt), x, steps)[:, 0].tolist() == [0, 0, 1, 0, 1, 0]
    assert draw(make(presence, [0], 3, prompt), x, steps)[:, 0].tolist() == [0, 1, 0, 0, 0, 0]


def test_min_tokens_bans_every_stop_until_enough_were_generated():
    x = np.array([0.0, 1.0, 2.0, 9.0, 8.0], np.float32)
    stops = {"stop_token_ids": [4], "min_tokens": 3}
    run = lambda **kw: draw(make(SamplingParams(temperature=0, **kw), [0], 5), x, 5)[:, 0].tolist()  # noqa: E731
    assert run(**stops) == [2, 2, 2, 3, 3]
    # An end of sequence that stops nothing is not a stop.
    assert run(**stops, ignore_eos=True) == [3, 3, 3, 3, 3]
    # Back from a preemption with two tokens generated: one more to go.
    sampler = make(SamplingParams(temperature=0, **stops), [0], 5, output=np.array([2, 2]))
    assert draw(sampler, x, 2)[:, 0].tolist() == [2, 3]


def test_min_tokens_ends_for_each_row_on_its_own():
    x = np.tile(np.array([0.0, 1.0, 2.0, 9.0], np.float32), (3, 1))
    sampler = Sampler(3, 4)
    for row, least in enumerate((4, 0, 2)):
        sampler.add(row, SamplingParams(temperature=0, min_tokens=least), 0, EMPTY, 0, EOS)
    seen = [np.array(sampler(mx.array(x), np.arange(3)).token_ids).tolist() for _ in range(5)]
    assert seen == [[2, 3, 2], [2, 3, 2], [2, 3, 3], [2, 3, 3], [3, 3, 3]]


def test_bias_on_a_banned_token_does_not_bring_it_back():
    x = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    params = SamplingParams(temperature=0, logit_bias={3: 1e38, 0: 5.0}, min_tokens=1)
    assert draw(make(params, [0], 4), x, 2)[:, 0].tolist() == [0, 3]


def test_penalty_rows_grow_are_reused_and_released():
    sampler = Sampler(5, 100)
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    assert sampler._seen is None
    for row, slots in enumerate((1, 2, 4, 4, 5)):
        sampler.add(row, params, 0, np.array([row, 7]), 1, EOS)
        assert sampler._seen.shape == (slots, 100)
    sampler.remove(1)
    sampler.add(1, params, 0, np.array([50, 51, 51]), 1, EOS)
    seen = np.array(sampler._seen)
    assert seen.shape == (5, 100)
    assert seen[1].nonzero()[0].tolist() == [50, 51]
    assert seen[1, [50, 51]].tolist() == [1, 4]
    for row in range(5):
        sampler.remove(row)
    assert sampler._seen is None


def test_penalty_state_is_updated_in_place():
    rows, vocab_size = 16, 50_000
    sampler = make(SamplingParams(temperature=0, repetition_penalty=1.1), range(rows), vocab_size)
    x = mx.array(random_logits(3, rows, vocab_size))
    for _ in range(3):
        tokens = sampler(x, np.arange(rows)).token_ids
        mx.eval(tokens)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(sampler._seen)
        assert mx.get_peak_memory() - before < sampler._seen.nbytes // 2


def test_token_ids_outside_the_vocabulary_are_harmless():
    params = SamplingParams(
        temperature=0, repetition_penalty=2.0, min_tokens=1, logit_bias={99: 5.0}
    )
    sampler = make(params, [0], 5, np.array([1, 400, -1]), np.array([2, 77]), eos=(500,))
    assert draw(sampler, np.array([0, 3, 2, 2, 1], np.float32), 1) == 3


# --- top-k, top-p, min-p -------------------------------------------------------------------------


def drawn(params, x, rows=400, steps=10):
    return set(draw(make(params, range(rows), len(x)), x, steps).ravel().tolist())


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
    # However many of these are at hand, for the sake of a neighbour.
    for neighbour in (SamplingParams(top_k=20), SamplingParams(top_p=0.5)):
        sampler = make(mine, range(50), len(x))
        sampler.add(7, neighbour, 0, EMPTY, 0, EOS)
        assert set(np.delete(draw(sampler, x, 10), 7, axis=1).ravel().tolist()) == {0}


def test_rows_without_filters_are_not_cut_by_those_of_a_neighbour():
    # Falling logits: what a neighbour's top_k needs are the lowest ids, all in a few blocks.
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
    params = SamplingParams(top_p=0.75)
    sampler = make(params, [0], len(x))
    sampler._plan_for(np.array([0]))
    floor = ops.thresholds(mx.array(x[None]), sampler._plan.filters)
    assert abs((x >= floor.item()).sum() - 50_000) < 50


@settings(max_examples=40, deadline=None, derandomize=True)
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


# --- the draw ------------------------------------------------------------------------------------


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


def test_draws_over_a_large_flat_vocabulary_are_uniform():
    size = 2000
    tokens = draw(make(SamplingParams(), range(1000), size), np.zeros(size, np.float32), 20)
    assert_fits(np.bincount(tokens.ravel(), minlength=size), np.full(size, 1 / size))


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


def test_noise_of_a_row_is_its_keys_own():
    keys = np.random.default_rng(4).integers(0, 2**32, (5, 2), dtype=np.uint32)
    for size in (1, 2, 7, 640):
        together = np.array(ops.random_bits(mx.array(keys), size))
        assert together.shape == (5, size)
        for key, row in zip(keys, together, strict=True):
            single = np.array(ops.random_bits(mx.array(key[None]), size))[0]
            np.testing.assert_array_equal(row, single)
        pairs = -(-size // 2)
        by_hand = mx.concatenate([mx.random.split(mx.array(k), pairs).reshape(1, -1) for k in keys])
        np.testing.assert_array_equal(together, np.array(by_hand)[:, :size])


@pytest.mark.parametrize(
    "temperature", [1.001e-5, 1e-3, 1e38, 1e300], ids=["least", "small", "large", "absurd"]
)
def test_extreme_temperatures(temperature):
    x = np.array([1.0, 3.0, -np.inf, 2.0], np.float32)
    for extra in ({}, {"top_p": 0.999, "min_p": 0.001, "top_k": 3}):
        tokens = drawn(SamplingParams(temperature=temperature, **extra), x, 100, 3)
        assert tokens == ({1} if temperature < 1 else {0, 1, 3})


# --- seeds ---------------------------------------------------------------------------------------

SEEDED = SamplingParams(
    temperature=1.2, top_k=40, top_p=0.97, repetition_penalty=1.3, frequency_penalty=0.2,
    min_tokens=4, stop_token_ids=[9], logit_bias={4: 2.0},
)  # fmt: skip
VOCAB = 6400
PROMPT = np.array([5, 6, 7, 5], np.int32)


def seeded_logits(step):
    """Rounded, so that ties are common, as with bfloat16 logits."""
    return random_logits(100 + step, VOCAB, scale=2.0).round(1)


def alone(params=SEEDED):
    sampler = make(params, [1234], VOCAB, PROMPT)
    return [
        sampler(mx.array(seeded_logits(i)[None]), np.array([0])).token_ids.item() for i in range(12)
    ]


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
    for i in range(cut):
        sampler(mx.array(seeded_logits(i)[None]), np.array([0]))
    sampler.remove(0)
    sampler.add(0, SamplingParams(presence_penalty=2.0), 9, PROMPT[:1], 1, EOS)
    sampler(mx.array(seeded_logits(0)[None]), np.array([0]))
    # The same row, or another one, with all that was generated.
    known = np.array([*PROMPT, *expected[:cut]], np.int32)
    sampler.add(0, SEEDED, 1234, known, len(PROMPT), EOS)
    for i in range(cut, len(expected)):
        token = sampler(mx.array(seeded_logits(i)[None]), np.array([0])).token_ids.item()
        assert token == expected[i]


def test_a_step_may_be_built_before_the_last_one_is_evaluated():
    sampler = make(SEEDED, [1234], VOCAB, PROMPT)
    out = [sampler(mx.array(seeded_logits(i)[None]), np.array([0])) for i in range(12)]
    assert mx.concatenate([o.token_ids for o in out]).tolist() == alone()


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


# --- odd logits ----------------------------------------------------------------------------------

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


# --- logprobs ------------------------------------------------------------------------------------


def check_logprobs(arrays, raw, chosen, k):
    raw = raw.astype(np.float64)
    expected = raw - np.log(np.exp(raw - raw.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= raw.max(1, keepdims=True)
    order = np.argsort(-raw, axis=1, kind="stable")[:, :k]
    ids = np.concatenate([chosen[:, None], order], 1)
    assert (arrays.token_ids.dtype, arrays.logprobs.dtype) == (mx.int32, mx.float32)
    assert arrays.ranks.dtype == mx.int32
    np.testing.assert_array_equal(np.array(arrays.token_ids), ids)
    np.testing.assert_allclose(
        np.array(arrays.logprobs), np.take_along_axis(expected, ids, 1), atol=4e-6
    )
    rank = 1 + (raw > np.take_along_axis(raw, chosen[:, None], 1)).sum(1)
    np.testing.assert_array_equal(np.array(arrays.ranks), rank)


@pytest.mark.parametrize("vocab_size", [70, 6400, 5003, 151_936])
@pytest.mark.parametrize("k", [0, 1, 5, 20, 64])
@pytest.mark.parametrize("ties", [False, True])
def test_prompt_logprobs(vocab_size, k, ties):
    x = random_logits(k, 7, vocab_size)
    x = x.round(0) if ties else x
    targets = np.random.default_rng(1).integers(0, vocab_size, 7)
    out = prompt_logprobs(mx.array(x), mx.array(targets.astype(np.int32)), k)
    check_logprobs(out, x, targets, k)


def test_a_long_prompt_is_scored_in_parts():
    x = random_logits(4, 600, 90)
    targets = np.random.default_rng(1).integers(0, 90, 600)
    out = prompt_logprobs(mx.array(x), mx.array(targets.astype(np.int32)), 3)
    check_logprobs(out, x, targets, 3)


def test_logprobs_are_of_the_raw_logits_and_as_many_as_the_most_demanding_row_wants():
    size = 3000
    x = random_logits(2, 4, size)
    sampler = Sampler(6, size)
    biased = {"logit_bias": {int(x[1].argmax()): -50.0}, "temperature": 0.0}
    for row, params in enumerate(
        [
            SamplingParams(temperature=2.0, logprobs=2),
            SamplingParams(**biased, logprobs=5),
            SamplingParams(temperature=3.0, top_k=4, repetition_penalty=3.0),
            SamplingParams(temperature=0, logprobs=0),
        ]
    ):
        sampler.add(row, params, row, np.array([1, 2]), 2, EOS)
    rows = np.array([2, 0, 1, 3])
    assert sampler.num_logprobs(rows).tolist() == [-1, 2, 5, 0]
    out = sampler(mx.array(x[rows]), rows)
    chosen = np.array(out.token_ids)
    check_logprobs(out.logprobs, x[rows], chosen, 5)
    assert np.array(out.logprobs.ranks)[2] == 2  # the runner-up, as the best was biased away
    only = np.array([3])
    check_logprobs(sampler(mx.array(x[only]), only).logprobs, x[only], x[only].argmax(1), 0)
    assert sampler(mx.array(x[[2]]), np.array([2])).logprobs is None


def test_logprobs_of_masked_tokens_are_minus_infinity():
    x = np.full((1, 10), -np.inf, np.float32)
    x[0, 4] = 3.0
    out = prompt_logprobs(mx.array(x), mx.array([2]), 2)
    assert out.logprobs.tolist() == [[-np.inf, 0.0, -np.inf]]
    assert out.ranks.tolist() == [2]


# --- what enters the graph -----------------------------------------------------------------------


def test_the_graph_holds_only_what_the_rows_ask_for(tmp_path):
    size = 64_000

    def graph(**kw):
        sampler = make(SamplingParams(**{"temperature": 0.0, **kw}), range(3), size)
        x = mx.zeros((3, size))
        mx.eval(x)
        return primitives(tmp_path / "graph", sampler(x, np.arange(3)).token_ids)

    greedy = graph()
    assert "ArgReduce" in greedy
    assert set(greedy) <= {"ArgReduce", "Squeeze", "View int32"}
    assert graph(top_k=5, top_p=0.5, min_p=0.5) == greedy
    assert not {"Sort", "Partition", "Exp", "Select"} & set(graph(temperature=1.0))
    assert graph(temperature=1.0).count("RandomBits") == 1
    # Top-p alone needs one sort of the row, a small top-k small ones only.
    assert [p for p in graph(temperature=1.0, top_p=0.9) if "Sort" in p] == ["Sort"]
    assert len(graph(logit_bias={1: 1.0})) == len(greedy) + 2
    # Each kind of penalty brings its own operations only.
    assert "RightShift" not in graph(repetition_penalty=1.5)
    assert "Divide" not in graph(presence_penalty=1.5)


def test_a_call_evaluates_nothing():
    size = 20_000
    sampler = make(SEEDED, range(8), size, PROMPT)
    x = mx.array(random_logits(0, 8, size))
    mx.eval(x, sampler._seen)
    before = mx.get_active_memory()
    out = sampler(x, np.arange(8))
    assert mx.get_active_memory() - before < x.nbytes // 8
    mx.eval(out.token_ids)


def test_an_unchanged_batch_keeps_its_plan():
    sampler = make(SEEDED, range(3), VOCAB, PROMPT)
    x = mx.array(random_logits(0, 3, VOCAB))
    sampler(x, np.arange(3))
    plan = sampler._plan
    for _ in range(3):  # min_tokens = 4
        assert sampler._plan is plan
        sampler(x, np.arange(3))
    sampler(x, np.arange(3))
    assert sampler._plan is not plan
    plan = sampler._plan
    sampler(x, np.arange(3))
    assert sampler._plan is plan
    sampler(x, np.array([2, 1, 0]))
    assert sampler._plan is not plan


@pytest.mark.skipif(not shutil.which("g++"), reason="MLX fuses on a CPU with a C++ compiler")
def test_fused_operations_equal_the_plain_ones(monkeypatch):
    x = random_logits(6, 4, VOCAB)
    run = lambda: make(SEEDED, range(4), VOCAB, PROMPT)  # noqa: E731
    plain = draw(run(), x[0], 4)
    monkeypatch.setattr(backend, "is_cpu", lambda: False)
    np.testing.assert_array_equal(draw(run(), x[0], 4), plain)
    # Any number of rows with one compilation.
    sampler = run()
    assert sampler(mx.array(x[:1]), np.array([0])).token_ids.item() == plain[0, 0]


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kw", "message"),
    [
        ({"logit_bias": {5: 1.0, 100: 1.0}}, "logit_bias .* 100, got 100"),
        ({"stop_token_ids": [1, 250]}, "stop_token_ids .* 100, got 250"),
    ],
)
def test_validate_names_value_and_limit(kw, message):
    with pytest.raises(SamplingError, match=message):
        validate(SamplingParams(**kw), 100)
    validate(SamplingParams(**kw), 251)
    validate(SamplingParams(), 1)


def test_shapes():
    sampler = make(SamplingParams(logprobs=1), range(3), 10)
    with pytest.raises(ValueError, match=r"logits must be \(2, 10\), got \(3, 10\)"):
        sampler(mx.zeros((3, 10)), np.arange(2))
    none = sampler(mx.zeros((0, 10)), np.arange(0))
    assert none.token_ids.shape == (0,)
    assert none.logprobs is None
