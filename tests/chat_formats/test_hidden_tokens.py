"""Special tokens that are no markers are not shown, wherever their text is cut."""

import pytest

from tests.support.chat.text import check_splits, parse
from vllm_metal_lite.chat_formats.detect import PLAIN
from vllm_metal_lite.chat_formats.json_markers import HERMES

HIDDEN = ("<|a|>", "<|a|b>", "<pad>", "[X]")


@pytest.mark.parametrize("chat_format", [PLAIN, HERMES])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one <|a|>two", "one two"),
        ("<pad><pad>[X]one[X]", "one"),
        ("<|a|b>one", "one"),
        ("a < b <| c <|a <p", "a < b <| c <|a <p"),
        ("one <|a", "one <|a"),
        ("[X", "[X"),
    ],
)
def test_what_is_shown(chat_format, text, shown):
    assert check_splits(chat_format, text, hidden=HIDDEN).text == shown


def test_in_thoughts_and_around_calls():
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    said = check_splits(
        HERMES, f"<think>\nI <|a|>look.<p\n</think>\n\nSo <|{call}<pad>Done.", hidden=HIDDEN
    )
    assert (said.reasoning, said.text, said.called) == ("I look.<p", "So <|\nDone.", [("now", {})])


def test_thoughts_that_end_with_a_begun_token():
    assert parse(HERMES, list("<think>\nI look <pa"), hidden=HIDDEN).reasoning == "I look <pa"


def test_thousands_of_tokens():
    hidden = [f"<unused{i}>" for i in range(5000)]
    assert parse(HERMES, list("a <unused4999>b <unused"), hidden=hidden).text == "a b <unused"
