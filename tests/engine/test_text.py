"""Text is what mlx-lm's streams give token by token, whenever it is read."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

from vllm_metal_lite import SamplingParams
from vllm_metal_lite.engine.detokenizer import Detokenizer
from vllm_metal_lite.model.loader import DEMO_PATH, load_tokenizer
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
@given(last=st.integers(0, 300), ids=tokens, skip=st.booleans(), reads=st.sets(st.integers(0, 23)))
def test_text_is_the_streams_whenever_it_is_read(tokenizer, last, ids, skip, reads):
    grown: list[int] = []
    params = SamplingParams(skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, params, grown, last)
    stream = tokenizer.detokenizer
    stream.add_token(last)
    start = len(stream.text)
    for at, token in enumerate(ids):
        grown.append(token)
        if token < len(TOKENIZER) and not (skip and token in SPECIAL):
            stream.add_token(token)
        expected = stream.text[start:]
        if at in reads:
            assert detokenizer.text() == expected
    detokenizer.end_at(len(ids))
    stream.finalize()
    assert detokenizer.text() == stream.text[start:]


def test_a_hidden_stop_token_is_never_seen():
    a, b, end = TOKENIZER.encode("a")[-1], TOKENIZER.encode("b")[-1], 300
    grown = [a, b]
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(), grown, a)
    assert detokenizer.text() == "ab"
    detokenizer.end_at(2)
    grown.append(end)
    assert detokenizer.text() == "ab"


def test_copies_of_an_output_stay_as_they_are():
    grown = TOKENIZER.encode("the red")
    output = CompletionOutput(0, token_ids=grown)
    assert output.text == ""
    output.text = Detokenizer(TOKENIZER, SamplingParams(), grown, grown[0]).text
    copies = [copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))]
    assert all(c == output for c in copies)
    before = output.text
    grown += TOKENIZER.encode(" box")
    assert output.text == before + " box"
    assert [c.text for c in copies] == [before] * 3
    assert f"text={before + ' box'!r}" in repr(output)
