"""Grammars where the markers are special tokens of the tokenizer."""

import re

import pytest

from tests.support.chat import guided
from tests.support.chat.byte_tokenizer import tokenizer_of
from tests.support.chat.text import TOOLS
from tests.support.chat.writers import WRITERS
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.grammars import marks_of
from vllm_metal_lite.chat_formats.tool import ToolChoice

hf = pytest.importorskip("llguidance.hf")
MARKER = re.compile(r"<[|｜][^<>]*[|｜]>|\[[A-Z_]+\]|</?[a-z_:]*(?:tool_calls?|TOOLCALL)>")


@pytest.mark.parametrize("name", list(WRITERS))
@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
def test_a_call(name, mode, special):
    text = WRITERS[name]([("read", {"path": "a.txt", "limit": 3})])
    text = text.removeprefix("<|python_tag|>").removesuffix("<|call|>")
    assert accepts(name, mode, text, special)


def test_channels():
    before = "".join(
        f"<|channel|>{channel}<|message|>I look.<|end|><|start|>assistant"
        for channel in ("analysis", "commentary", "analysis")
    )
    call = '<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": %s}'
    final = "<|channel|>final<|message|>Done."
    for begun in "", before:
        assert accepts("harmony", "auto", begun + final)
        assert not accepts("harmony", "required", begun + final)
        for mode in "auto", "required":
            assert accepts("harmony", mode, begun + call % '"a"')
            assert not accepts("harmony", mode, begun + call % 5)


def accepts(name: str, mode: str, text: str, special: bool = True) -> bool:
    tokenizer = tokenizer_of(set(MARKER.findall(text)), special)
    grammar = FORMATS[name].grammar(TOOLS, ToolChoice(mode), marks_of(tokenizer))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return guided.accepts(hf.from_tokenizer(tokenizer), grammar, tokens)
