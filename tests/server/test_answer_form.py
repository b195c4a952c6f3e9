"""What an answer must be, from tool_choice, strict tools and the form that is asked for."""

import json

import pytest

from tests.support.chat import guided
from tests.support.chat.byte_tokenizer import tokenizer_of
from vllm_metal_lite.chat_formats.detect import PLAIN
from vllm_metal_lite.chat_formats.harmony import HARMONY
from vllm_metal_lite.chat_formats.json_markers import HERMES
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.structured import answer_form
from vllm_metal_lite.structured_outputs.marks import marks_of
from vllm_metal_lite.structured_params import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")
hf = pytest.importorskip("llguidance.hf")
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
LOOSE, STRICT = Tool("run", "", SCHEMA), Tool("run", "", SCHEMA, strict=True)
FORM = StructuredOutputsParams(json={**SCHEMA, "additionalProperties": False})
AUTO, NONE, REQUIRED = ToolChoice("auto"), ToolChoice("none"), ToolChoice("required")


def call(**arguments):
    return f'<tool_call>\n{{"name": "run", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def accepts(form, text):
    return guided.accepts(llguidance.LLTokenizer("byte"), form.grammar, text.encode())


def form_of(tools, choice, form=None, chat_format=HERMES):
    return answer_form(chat_format, {}, tools, choice, form)


def test_calls_that_are_demanded():
    for tools in [LOOSE], [STRICT]:
        for given in None, FORM:
            form = form_of(tools, REQUIRED, given)
            assert accepts(form, call(x=1))
            assert not accepts(form, call(x="1"))
            assert not accepts(form, "So be it.")


def test_calls_of_strict_tools_follow_their_schema():
    form = form_of([STRICT], AUTO)
    assert accepts(form, "So be it.")
    assert accepts(form, f"I look. {call(x=1)}")
    assert not accepts(form, call(x="1"))


def test_calls_or_a_form():
    for tool in LOOSE, STRICT:
        form = form_of([tool], AUTO, FORM)
        assert accepts(form, '{"x": 1}')
        assert accepts(form, call(x=1))
        assert not accepts(form, "So be it.")
        assert not accepts(form, '{"x": "1"}')
    assert accepts(form_of([LOOSE], AUTO, StructuredOutputsParams(json_object=True)), '{"y": 2}')


THOUGHTS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_RUN = "<|channel|>commentary to=functions.run <|constrain|>json<|message|>"


@pytest.mark.parametrize("tools", [[], [LOOSE], [STRICT]])
@pytest.mark.parametrize("choice", [AUTO, NONE])
@pytest.mark.parametrize(("asked", "good", "bad"), [
    ({"json": FORM.json}, '{"x": 1}', '{"x": "1"}'), ({"json_object": True}, "{}", "So"),
    ({"json": FORM.json, "disable_any_whitespace": True}, '{"x":1}', '{"x": 1}'),
    ({"choice": ["yes", "no"]}, "yes", "so"), ({"regex": "a/b+"}, "a/bb", "a"),
    ({"grammar": 'start: final\nfinal: "a" | "b"'}, "b", "c"),
    ({"grammar": 'root ::= "a" | "b"'}, "b", "c"),
])  # fmt: skip
def test_a_form_in_a_channel(tools, choice, asked, good, bad):
    tokenizer = tokenizer_of({*HARMONY.call_ends}, special=True)
    asked = StructuredOutputsParams(**asked)
    form = answer_form(HARMONY, marks_of(tokenizer), tools, choice, asked)
    takes_calls = bool(tools) and choice is AUTO and asked.kind in ("json", "json_object")
    texts = {FINAL + good: True, FINAL + bad: False, TO_RUN + '{"x": 1}': takes_calls, good: False}
    for text, fits in texts.items():
        for before in "", THOUGHTS:
            tokens = tokenizer.encode(before + text, add_special_tokens=False)
            assert guided.accepts(hf.from_tokenizer(tokenizer), form.grammar, tokens) == fits


def test_no_calls_to_follow_a_grammar():
    assert form_of([LOOSE], AUTO) is None
    assert form_of([STRICT], NONE) is None
    assert form_of([], AUTO) is None
    assert form_of([STRICT], AUTO, chat_format=PLAIN) is None
    choice = StructuredOutputsParams(choice=["yes", "no"])
    assert form_of([STRICT], AUTO, choice) is choice
    assert form_of([], AUTO, FORM) is FORM
    assert form_of([STRICT], NONE, FORM) is FORM
    assert form_of([STRICT], AUTO, FORM, PLAIN) is FORM


def test_a_format_without_a_grammar_cannot_be_made_to_call():
    with pytest.raises(ApiError, match=r"'auto' or 'none'.*\(plain\) has no grammar") as caught:
        form_of([LOOSE], REQUIRED, chat_format=PLAIN)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")
