"""Texts encoded piece by piece have the tokens of the whole text."""

from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm_metal_lite.errors import PromptTooLong
from vllm_metal_lite.server.piece_encoder import PieceEncoder

ADDED = [
    AddedToken("<|start|>", normalized=False, special=True),
    AddedToken("<|start|>x", normalized=False),
    AddedToken("x<", normalized=False),
    AddedToken("<l>", normalized=False, lstrip=True),
    AddedToken("<r>", normalized=False, rstrip=True),
    AddedToken("<|user|>", normalized=True),
    AddedToken("|>  <", normalized=True),
]
WORDS = ["x", " ", "  ", "\n", "ab", " ab", "é", "日", "<", "|>", "<|", "start", "\u0301", "▁"]


def words_tokenizer(normalizer, pre_tokenizer, added=()) -> PreTrainedTokenizerFast:
    """One token a letter, or two that are often neighbours."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) | set("▁é日\u0301"))
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [("a", "b"), ("Ġ", "a"), ("▁", "a"), ("Ġ", "Ġ"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    tokenizer.add_tokens([*ADDED, *added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "byte level": words_tokenizer(None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix space": words_tokenizer(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "empty normalizer": words_tokenizer(
        normalizers.Sequence([]), pre_tokenizers.ByteLevel(add_prefix_space=False)
    ),
    "normalized": words_tokenizer(
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")]), None
    ),
    "prepended": words_tokenizer(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None
    ),
    "single words": words_tokenizer(
        None, pre_tokenizers.ByteLevel(), [AddedToken("<|", single_word=True)]
    ),
    "first only": words_tokenizer(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(st.lists(st.sampled_from([*WORDS, *(t.content for t in ADDED)]), max_size=12).map("".join))
@example("<|user|>  <|start|>ab")
@example("<r>  <|start|>  <l>ab<|start|>x<")
def test_pieces_have_the_tokens_of_the_whole(name, text):
    tokenizer = TOKENIZERS[name]
    encode = PieceEncoder(tokenizer)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert encode(text) == expected
    assert encode(text) == expected


class Counting:
    """A tokenizer that notes what it encodes."""

    def __init__(self) -> None:
        self.tokenizer, self.encoded = TOKENIZERS["byte level"], []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode(self, text, **how):
        self.encoded.append(text)
        return self.tokenizer.encode(text, **how)


def test_a_turn_encodes_only_what_is_new():
    tokenizer = Counting()
    encode = PieceEncoder(tokenizer)
    encode("<|start|>ab<|start|>ab ab")
    tokenizer.encoded.clear()
    encode("<|start|>ab<|start|>ab ab<|start|>x<|user|>ab")
    assert tokenizer.encoded == ["<|start|>x", "<|user|>ab"] or tokenizer.encoded == [
        "<|start|>x<|user|>ab"
    ]


def test_the_pieces_kept_are_bounded_and_the_oldest_go():
    tokenizer = Counting()
    tokenizer.tokenizer = Mock(wraps=tokenizer.tokenizer, encode=lambda text, **how: [1])
    encode, (a, b, c) = PieceEncoder(tokenizer), ("<|start|>" + x * 1_900_000 for x in "abc")
    for text in a, b, a, c:  # two of them are kept
        encode(text)
    tokenizer.encoded.clear()
    encode(a)
    assert tokenizer.encoded == []
    encode(b)
    assert tokenizer.encoded == [b]


def test_a_slow_tokenizer_gets_the_whole_text():
    tokenizer = Counting()
    tokenizer.is_fast = False
    PieceEncoder(tokenizer)("<|start|>ab<|start|>ab")
    assert tokenizer.encoded == ["<|start|>ab<|start|>ab"]


def test_a_text_of_too_many_tokens_is_refused_before_its_end():
    for text in "x " * 100_000, "<|start|>x x x" * 14_000:
        encode = PieceEncoder(TOKENIZERS["byte level"])
        num_tokens = len(encode(text))
        assert encode(text, num_tokens) == encode(text)
        with pytest.raises(PromptTooLong) as refused:
            PieceEncoder(TOKENIZERS["byte level"])(text, 200)
        assert refused.value.num_tokens == pytest.approx(num_tokens, rel=0.1)


def test_the_caller_may_end_it_between_two_pieces():
    encode, left = PieceEncoder(TOKENIZERS["byte level"]), iter(range(3))
    with pytest.raises(StopIteration):
        encode("<|start|>x" * 10, check=lambda: next(left))
