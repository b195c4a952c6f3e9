"""Limits on the next token: grammar masks, allowed tokens and bad words, against plain loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.sampling import EMPTY, make, random_logits
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.intake import bad_word_ids
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.model import loader
from vllm_metal_lite.sampling.masks import TokenMasks, pack_mask
from vllm_metal_lite.sampling.processors import put_on_device
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def random_bits(rng, rows, vocab_size):
    """(rows, words) int32 as a grammar library gives them, and the same as a boolean table."""
    may = rng.random((rows, vocab_size)) < 0.5
    bits = np.stack([pack_mask(np.flatnonzero(row), vocab_size) for row in may])
    return bits.view(np.int32), may


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 101, 4096])
def test_masks_forbid_what_their_bits_do_not_name(vocab_size):
    rng = np.random.default_rng(vocab_size)
    bits, may = random_bits(rng, 3, vocab_size)
    x = random_logits(0, 5, vocab_size)
    rows = np.array([4, 0, 2])
    out = np.array(put_on_device(TokenMasks(rows, bits), 5)(mx.array(x)))
    expected = x.copy()
    for row, allowed in zip(rows, may, strict=True):
        expected[row, ~allowed] = -np.inf
    np.testing.assert_array_equal(out, expected)


def test_the_bits_are_counted_from_the_low_end_of_each_word():
    assert pack_mask([0, 33], 40).tolist() == [1, 2]
    assert pack_mask([31, 39, 40, -1], 40).tolist() == [2**31, 2**7]


def test_a_token_beyond_the_end_of_the_mask_may_not_come():
    mask = TokenMasks(np.array([0]), np.array([[-1]], np.int32))  # 32 tokens, all of them
    out = np.array(put_on_device(mask, 1)(mx.zeros((1, 40))))[0]
    assert (out[:32] == 0).all()
    assert (out[32:] == -np.inf).all()


def test_a_grammar_counts_before_logprobs_and_for_its_rows_only():
    x = random_logits(0, 3, 50, scale=1.0)
    sampler = make(SamplingParams(temperature=0, logprobs=2), [0] * 3, 50, eos=())
    masks = TokenMasks(np.array([1]), pack_mask([7, 9], 50)[None])
    out = sampler(mx.array(x), np.arange(3), masks)
    tokens, logprobs = np.array(out.token_ids), np.array(out.logprobs.logprobs)
    best = 7 if x[1, 7] >= x[1, 9] else 9
    assert tokens.tolist() == [x[0].argmax(), best, x[2].argmax()]
    assert np.exp(logprobs[1, 1:]).sum() == pytest.approx(1, abs=1e-5)  # two tokens are all
    assert np.exp(logprobs[0, 1:]).sum() < 0.9


def test_only_allowed_tokens_are_drawn_and_neighbours_are_free():
    x, allowed = random_logits(0, 2, 300, scale=1.0), [3, 5, 250]
    sampler = make(SamplingParams(temperature=2.0), [1, 1], 300, eos=())
    params = SamplingParams(temperature=2.0, allowed_token_ids=allowed)
    sampler.add(0, params, 1, EMPTY, 0, ())
    drawn = np.array([np.array(sampler(mx.array(x), np.arange(2)).token_ids) for _ in range(200)])
    assert set(drawn[:, 0]) == set(allowed)
    assert len(set(drawn[:, 1])) > 20
    sampler.add(0, GREEDY, 1, EMPTY, 0, ())  # the seat's next request is free too
    assert np.array(sampler(mx.array(x), np.arange(2)).token_ids)[0] == x[0].argmax()


def reference_banned(words, generated):
    return {w[-1] for w in words if len(w) == 1 or generated[1 - len(w) :] == w[:-1]}


words = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=4)


@settings(max_examples=150)
@given(st.lists(words, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_bad_words_of_a_mixed_batch_match_a_plain_loop(words_of, seed):
    """Six tokens, so that words come up all the time; rows join, leave and come back."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(4, 6)
    generated = {}
    for row, bad in enumerate(words_of):
        output = rng.integers(0, 6, rng.integers(0, 4)).tolist()
        tokens = np.array([1, 2, *output], np.int32)
        sampler.add(row, GREEDY, 0, tokens, 2, (), bad)
        generated[row] = output
    for _ in range(8):
        rows = rng.permutation(len(words_of))[: rng.integers(1, len(words_of) + 1)]
        x = rng.normal(size=(len(rows), 6)).astype(np.float32)
        found = np.array(sampler(mx.array(x), rows).token_ids)
        for row, scores, token in zip(rows.tolist(), x, found.tolist(), strict=True):
            banned = reference_banned(words_of[row], generated[row])
            scores[list(banned)] = -np.inf
            assert token == (scores.argmax() if len(banned) < 6 else 0)
            generated[row].append(token)


def test_a_step_with_bad_words_may_be_built_before_the_last_one_is_evaluated():
    x = np.zeros((1, 4), np.float32)
    x[0] = [0, 3, 2, 1]  # 1 is the best, then 2
    sampler = Sampler(1, 4)
    sampler.add(0, GREEDY, 0, EMPTY, 0, (), [[1, 1]])
    steps = [sampler(mx.array(x), np.arange(1)).token_ids for _ in range(4)]
    assert [int(t[0]) for t in steps] == [1, 2, 1, 2]


class Letters:
    """One token a character."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]


def test_words_are_looked_for_after_a_space_where_that_is_another_token():
    assert bad_word_ids(Letters(), ["ab"]) == [[97, 98]]  # "ab" is found in " ab" too

    class Words:
        def encode(self, text, add_special_tokens):
            return [2 if text.startswith(" ") else 1, 7]

    assert bad_word_ids(Words(), [" ab"]) == [[1, 7], [2, 7]]


def test_bad_words_in_the_embedded_engine(tmp_path):
    model = loader.load(str(tiny.write_folder(tmp_path / "m", "llama")))
    prompt = [3, 4, 5]
    plain = tiny.alone(model.packed.model, prompt, 20)
    character = tiny.CHARACTERS[next(t for t in plain if 0 < t < tiny.EOS)]
    engine = LLMEngine(model)
    common = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    engine.add_request("free", prompt, SamplingParams(**common))
    engine.add_request("bound", prompt, SamplingParams(**common, bad_words=[character]))
    done = tiny.run(engine)
    assert done["free"].outputs[0].token_ids == plain
    assert tiny.CHARACTERS.index(character) not in done["bound"].outputs[0].token_ids


def test_bad_words_need_a_tokenizer():
    engine = tiny.engine()
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        engine.add_request("x", [1], SamplingParams(bad_words=["x"]))
    assert not engine.has_unfinished_requests()
