"""What an answer must be, from tool_choice, strict tools and the form that is asked for."""

import json
from dataclasses import replace

import pytest

from tests.support.chat import guided
from vllm_metal_lite.chat_formats.detect import PLAIN
from vllm_metal_lite.chat_formats.json_markers import HERMES
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.structured import answer_form
from vllm_metal_lite.structured_params import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")
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


def test_no_demand():
    assert form_of([LOOSE], AUTO) is None
    assert form_of([STRICT], NONE) is None
    assert form_of([], AUTO) is None
    assert form_of([STRICT], AUTO, chat_format=PLAIN) is None


def test_a_form_alone():
    choice = StructuredOutputsParams(choice=["yes", "no"])
    assert form_of([STRICT], AUTO, choice) is choice
    assert form_of([], AUTO, FORM) is FORM
    assert form_of([STRICT], NONE, FORM) is FORM
    assert form_of([STRICT], AUTO, FORM, PLAIN) is FORM


def test_a_format_without_a_grammar_cannot_be_made_to_call():
    with pytest.raises(ApiError, match=r"'auto' or 'none'.*\(plain\) has no grammar") as caught:
        form_of([LOOSE], REQUIRED, chat_format=PLAIN)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


def test_nor_can_its_calls_be_strict():
    loose = replace(HERMES, grammar=None)
    assert form_of([LOOSE], AUTO, chat_format=loose) is None
    with pytest.raises(ApiError, match=r"'run' cannot be strict: .*\(hermes\)") as caught:
        form_of([LOOSE, STRICT], AUTO, chat_format=loose)
    assert (caught.value.status, caught.value.param) == (400, "tools")
