"""Text is what mlx-lm's streams give token by token, whenever it is read."""

import copy
import pickle
from itertools import takewhile
from unittest.mock import Mock, PropertyMock
from weakref import WeakSet

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.utils import load_tokenizer
from transformers import PreTrainedTokenizerFast

from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.engine.detokenizer import Detokenizer, token_texts
from vllm_metal_lite.model.files.find import DEMO_PATH
from vllm_metal_lite.outputs import CompletionOutput

TOKENIZER = load_tokenizer(DEMO_PATH)
SPECIAL = {i for i, t in TOKENIZER.added_tokens_decoder.items() if t.special}
WRAPPERS = [
    TokenizerWrapper(TOKENIZER._tokenizer, stream)
    for stream in (BPEStreamingDetokenizer, SPMStreamingDetokenizer, NaiveStreamingDetokenizer)
]
# The first ids are the markup and single bytes, half of them parts of characters.
token = st.integers(0, 6) | st.integers(0, 300) | st.integers(0, len(TOKENIZER) + 5)
tokens = st.lists(token, min_size=1, max_size=24)


@pytest.mark.parametrize("tokenizer", WRAPPERS, ids=lambda t: type(t.detokenizer).__name__)
@given(prompt=tokens, ids=tokens, skip=st.booleans(), reads=st.sets(st.integers(0, 23)))
@example(prompt=[0, 99, 131], ids=[99], skip=False, reads=set())  # no character, and half of one
def test_text_is_the_streams_whenever_it_is_read(tokenizer, prompt, ids, skip, reads):
    """The text is what the stream of prompt and answer shows after the prompt's text."""
    grown: list[int] = []
    params = SamplingParams(skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, params, grown, prompt)
    stream = tokenizer.detokenizer
    add_tokens(stream, prompt)
    stream.finalize()
    prompt_text = stream.text
    stream.reset()
    add_tokens(stream, prompt)

    def expected():
        pairs = zip(prompt_text, stream.text, strict=False)
        return stream.text[len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))) :]

    for at, token in enumerate(ids):
        grown.append(token)
        if not (skip and token in SPECIAL):
            add_tokens(stream, [token])
        if at in reads:
            assert detokenizer.text() == expected()
    detokenizer.end_at(len(ids))
    stream.finalize()
    assert detokenizer.text() == expected()


def add_tokens(stream, ids):
    for token in ids:
        if token < len(TOKENIZER):
            stream.add_token(token)


def byte_fallback_tokenizer():
    """Characters outside the vocabulary are bytes, as in SentencePiece models."""
    letters = ["<unk>", "\u2581", *"ab.", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = tokenizers.models.BPE(
        {t: i for i, t in enumerate(letters)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    steps = tokenizers.decoders
    tokenizer.decoder = steps.Sequence(
        [steps.Replace("\u2581", " "), steps.ByteFallback(), steps.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTE_FALLBACK = byte_fallback_tokenizer()
OF_BYTES = [
    TOKENIZER,
    TokenizerWrapper(TOKENIZER._tokenizer, NaiveStreamingDetokenizer),
    TokenizerWrapper(BYTE_FALLBACK, SPMStreamingDetokenizer),
    TokenizerWrapper(BYTE_FALLBACK, NaiveStreamingDetokenizer),
]


def kind(tokenizer):
    return f"{type(tokenizer.detokenizer).__name__}-{len(tokenizer)}"


def test_a_text_that_nobody_reads_costs_no_stream():
    tokenizer = Mock(wraps=TOKENIZER)
    tokenizer.__len__ = lambda self: len(TOKENIZER)
    tokenizer.added_tokens_decoder, tokenizer.all_special_ids = {}, []
    of_tokenizer = PropertyMock(side_effect=lambda: TOKENIZER.detokenizer)
    type(tokenizer).detokenizer = of_tokenizer
    Detokenizer(tokenizer, SamplingParams(), [], [300])  # learns what the tokenizer's streams are
    of_tokenizer.reset_mock()
    detokenizer = Detokenizer(tokenizer, SamplingParams(), [301], [300])
    detokenizer.end_at(1)
    assert not of_tokenizer.called
    assert detokenizer.text() == Detokenizer(TOKENIZER, SamplingParams(), [301], [300]).text() != ""


@pytest.mark.parametrize("tokenizer", OF_BYTES, ids=kind)
@given(text=st.text("ab. \u00e9\u65e5\u672c\U0001f389", min_size=1, max_size=8), data=st.data())
def test_an_answer_may_begin_within_a_character(tokenizer, text, data):
    """Wherever the tokens of a text are cut, the answer's text begins with the first character that
    the prompt does not end, and no U+FFFD is in it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    first = ""
    for cut in range(1, len(ids)):
        read, answer = tokenizer.decode(ids[:cut]), ids[cut:]
        first = first if "\ufffd" in read else read
        detokenizer = Detokenizer(tokenizer, SamplingParams(), answer, ids[:cut])
        if data.draw(st.booleans(), "read before its end"):
            assert "\ufffd" not in detokenizer.text()
        detokenizer.end_at(len(answer))
        assert first + detokenizer.text() == text


@pytest.mark.parametrize("tokenizer", OF_BYTES, ids=kind)
@pytest.mark.parametrize("prompt", ["remember \U0001f389", "copy the \u65e5\u672c"])
def test_the_prompts_last_character_is_none_of_the_answer(tokenizer, prompt):
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    open_ids = ids[:-1]  # the last character lacks a byte that never comes
    for prompt_ids in (ids, open_ids):
        answer = tokenizer.encode("ab", add_special_tokens=False)
        stops = Detokenizer(tokenizer, SamplingParams(stop="\ufffd"), answer, prompt_ids)
        assert stops.find_stop() is None
        empty = Detokenizer(tokenizer, SamplingParams(), [], prompt_ids)
        empty.end_at(0)
        assert (stops.text(), empty.text()) == ("ab", "")


def test_the_demo_answers_a_prompt_that_ends_with_an_emoji():
    llm = LLM("demo", num_blocks=64, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=8, n=2, stop="\ufffd", ignore_eos=True)
    prompt = "remember \U0001f389"
    for given_as in (prompt, {"prompt_token_ids": TOKENIZER.encode(prompt)}):
        for answer in llm.generate(given_as, params)[0].outputs:
            assert answer.finish_reason == "length"
            assert answer.text == TOKENIZER.decode(answer.token_ids, skip_special_tokens=True)


def test_a_hidden_stop_token_is_never_seen():
    a, b, end = TOKENIZER.encode("a")[-1], TOKENIZER.encode("b")[-1], 300
    grown = [a, b]
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(), grown, [a])
    assert detokenizer.text() == "ab"
    detokenizer.end_at(2)
    grown.append(end)
    assert detokenizer.text() == "ab"


def test_copies_of_an_output_stay_as_they_are():
    grown = TOKENIZER.encode("the red")
    output = CompletionOutput(0, token_ids=grown)
    assert output.text == ""
    output.text = Detokenizer(TOKENIZER, SamplingParams(), grown, grown[:1]).text
    copies = [copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))]
    assert all(c == output for c in copies)
    before = output.text
    grown += TOKENIZER.encode(" box")
    assert output.text == before + " box"
    assert [c.text for c in copies] == [before] * 3
    assert f"text={before + ' box'!r}" in repr(output)


def test_tokenizers_that_nobody_uses_are_not_kept():
    class Tokenizer:
        def decode(self, token_ids):
            return f"{token_ids}"

    made = [Tokenizer() for _ in range(20)]
    alive = WeakSet(made)
    while made:
        assert token_texts(made.pop())(7) == "[7]"
    assert len(alive) <= 8
