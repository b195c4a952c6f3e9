"""Text of byte-level vocabularies whose tokenizer.json has another decoder."""

import json
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer, decoders

from vllm_metal_lite.engine.detokenizer import Detokenizer
from vllm_metal_lite.model.files.find import DEMO_PATH
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only
from vllm_metal_lite.sampling_params import SamplingParams

SPM = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "its own": decoders.ByteLevel(),
    "SentencePiece's": decoders.Sequence(SPM),
    "SentencePiece's, which strips": decoders.Sequence([*SPM, decoders.Strip(" ", 1, 0)]),
    "Metaspace": decoders.Metaspace(),
    "none": None,
}
TEXT = " Hello  the world, \U0001f389 caf\u00e9 7\n\tok \u65e5\u672c "


def folder_with(path, decoder, change=lambda tokenizer: None):
    shutil.copytree(DEMO_PATH, path, dirs_exist_ok=True)
    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.decoder = decoder
    change(tokenizer)
    tokenizer.save(file)
    return str(path)


def streamed(tokenizer, ids: list[int]) -> str:
    text = Detokenizer(tokenizer, SamplingParams(), ids, [])
    text.end_at(len(ids))
    return text.text()


@pytest.mark.parametrize("kind", DECODERS)
def test_the_vocabulary_decides_how_tokens_become_text(tmp_path, kind):
    tokenizer = load_tokenizer_only(folder_with(tmp_path, DECODERS[kind]))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == TEXT


def test_an_emoji_that_is_a_token_of_its_own_stays(tmp_path):
    def add(tokenizer):
        tokenizer.add_tokens([AddedToken("\U0001f999", normalized=False)])

    tokenizer = load_tokenizer_only(folder_with(tmp_path, decoders.Sequence(SPM), add))
    text = "a \U0001f999 and \U0001f389"
    ids = tokenizer.encode(text)
    assert tokenizer.convert_tokens_to_ids("\U0001f999") in ids
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == text


def test_a_vocabulary_of_letters_keeps_the_letter(tmp_path):
    """The letter that represents a space elsewhere is one of Maltese."""
    path = folder_with(tmp_path, decoders.Sequence(SPM))
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"] = {
        "type": "BPE",
        "vocab": {"\u0120": 0, "\u2581": 1, "a": 2},
        "merges": [],
        "unk_token": "a",
    }
    content["pre_tokenizer"], content["added_tokens"] = None, []
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer_only(path)
    assert tokenizer.decode(tokenizer.encode("a \u0120a")) == "a \u0120a"
