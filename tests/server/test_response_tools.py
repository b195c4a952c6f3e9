"""Tools of the Responses API as functions with flat names; the input of freeform tools is read from
JSON while it is written, however it is cut.
"""

import json
import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.openai_api.response_tools import Callee, FreeformInput, ResponseTools

CMD = {"type": "object", "properties": {"cmd": {"type": "string"}}}
RUN = {"type": "function", "name": "run", "description": "Runs.", "strict": True, "parameters": CMD}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": LARK}
WAIT = {"type": "function", "name": "wait"}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [WAIT]}


def names(found):
    return list(found.tools)


def offered(tools, choice=None, items=(), parallel=True):
    return ResponseTools(tools, list(items), choice, parallel)


def test_functions():
    found = offered([RUN, {"type": "function", "name": "bare", "parameters": None}])
    run, bare = found.tools.values()
    assert (run.name, run.description, run.strict) == ("run", "Runs.", True)
    assert run.parameters == RUN["parameters"]
    assert (bare.description, bare.parameters, bare.strict) == ("", {}, False)
    assert found.callees["run"] == Callee("function", "run")
    assert (found.choice.mode, found.choice.parallel) == ("auto", True)


def test_tools_in_a_namespace_have_flat_names():
    inner = {"type": "namespace", "name": "mcp__files__", "tools": [WAIT, PATCH]}
    found = offered([AGENTS, inner, {"type": "namespace", "name": "functions", "tools": [RUN]}])
    assert found.callees == {
        "agents__wait": Callee("function", "wait", "agents"),
        "mcp__files__wait": Callee("function", "wait", "mcp__files__"),
        "mcp__files__apply_patch": Callee("custom", "apply_patch", "mcp__files__"),
        "run": Callee("function", "run", "functions"),
    }
    assert names(found) == list(found.callees)


def test_a_custom_tool_is_a_function_of_one_string():
    [tool] = offered([PATCH]).tools.values()
    about = tool.parameters["properties"]["input"]
    assert about["type"] == "string"
    assert about["description"].endswith("It must match this lark grammar:\nstart: /.+/")
    assert tool.parameters["required"] == ["input"]
    say = {"type": "custom", "name": "say", "format": {"type": "text"}}
    [plain] = offered([say]).tools.values()
    assert "grammar" not in plain.parameters["properties"]["input"]["description"]


def test_tools_that_this_server_cannot_run_are_left_out(caplog):
    """The log names each type once, whatever the request."""
    one, two = {"type": "palm_reading"}, {"type": "card_reading"}
    with caplog.at_level(logging.WARNING):
        found = offered([one, RUN, two, one])
    assert names(found) == ["run"]
    assert list(found.definitions) == [RUN]
    assert [record.message for record in caplog.records] == [
        "tools of type 'palm_reading' are left out: models here call functions and custom tools",
        "tools of type 'card_reading' are left out: models here call functions and custom tools",
    ]


def test_additional_tools_come_with_the_input():
    more = {"type": "additional_tools", "role": "developer", "tools": [AGENTS]}
    items = [more, {"role": "user", "content": "x"}]
    assert names(offered([RUN], items=items)) == ["run", "agents__wait"]
    assert names(offered(None, items=[more])) == ["agents__wait"]
    assert names(ResponseTools(None, "hi", None, True)) == []


ALL = ["run", "apply_patch", "agents__wait"]
NAMED = {"type": "function", "name": "wait"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": []}
SOME = {**ALLOWED, "mode": "required", "tools": [NAMED, {"type": "web_search"}]}


@pytest.mark.parametrize(
    ("choice", "mode", "name", "allowed"),
    [
        (None, "auto", None, ALL),
        ("auto", "auto", None, ALL),
        ("required", "required", None, ALL),
        ("none", "none", None, ALL),
        ({"type": "function", "name": "run"}, "named", "run", ALL),
        ({"type": "custom", "name": "apply_patch"}, "named", "apply_patch", ALL),
        ({**NAMED, "namespace": None}, "named", "agents__wait", ALL),
        ({**NAMED, "namespace": "agents"}, "named", "agents__wait", ALL),
        (SOME, "required", None, ["agents__wait"]),
        (ALLOWED, "auto", None, []),
    ],
)
def test_choices(choice, mode, name, allowed):
    """The model is shown all tools, so that the cached prefix of its prompt still fits."""
    found = offered([RUN, PATCH, AGENTS], choice, parallel=False)
    assert (found.choice.mode, found.choice.name) == (mode, name)
    assert found.choice.parallel is False
    assert names(found) == ALL
    assert [n for n, tool in found.tools.items() if found.choice.allows(tool)] == allowed


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ({}, None, "tools must be a list, got {}"),
        ([5], None, "tools.0 must be an object with a type, got 5"),
        ([{"name": "x"}], None, "tools.0 must be an object with a type"),
        ([{"type": "function"}], None, "tools.0.name must be a non-empty string, got None"),
        ([{**RUN, "parameters": 5}], None, "tools.0.parameters must be an object, got 5"),
        ([{**PATCH, "format": 5}], None, "tools.0.format must be an object, got 5"),
        ([{"type": "namespace", "name": "a"}], None, "tools.0.tools must be a list, got None"),
        ([{**AGENTS, "tools": [RUN, {**WAIT, "name": 5}]}], None, "tools.0.tools.1.name must be a"),
        ([RUN, RUN], None, "tools.1: two tools have the name 'run'"),
        (
            [AGENTS, {**WAIT, "name": "agents__wait"}],
            None,
            "tools.1: two tools have the name 'agents",
        ),
        ([RUN], "any", "tool_choice must be 'auto', 'none', 'required'"),
        ([RUN], {"type": "web_search_preview"}, "tool_choice must be 'auto'"),
        ([RUN], {"type": ["function"]}, "tool_choice must be 'auto'"),
        ([RUN], {"type": "function"}, "tool_choice.name must be a non-empty string"),
        ([RUN], {"type": "function", "name": "x"}, "names 'x', which is not in tools"),
        ([AGENTS], {"type": "function", "name": "wait", "namespace": "b"}, "names 'wait', which"),
        ([RUN], {"type": "allowed_tools", "mode": "x"}, "tool_choice.mode must be"),
        ([RUN], {"type": "allowed_tools"}, "tool_choice.tools must be a list"),
        ([AGENTS, {**AGENTS, "name": "b"}], {"type": "function", "name": "wait"}, "several"),
        ([RUN], {"type": "allowed_tools", "tools": [5]}, "tool_choice.tools.0 must be an object"),
        ([{"type": "web_search"}], "required", "tool_choice demands a call"),
        ([], "required", "tool_choice demands a call"),
    ],
)
def test_bad_tools_are_named(tools, choice, words):
    with pytest.raises(ApiError) as caught:
        offered(tools, choice)
    assert caught.value.status == 400
    assert words in caught.value.message


TEXT = '*** Begin Patch\n*** Update File: a.py\n@@\n-x = "\\n"\n+x = "é 😀"\n*** End Patch\n'


def read(*pieces):
    reader = FreeformInput()
    return "".join([*map(reader.feed, pieces), reader.close()])


@pytest.mark.parametrize("ascii_only", [True, False])
def test_every_cut_gives_the_same(ascii_only):
    raw = json.dumps({"input": TEXT}, ensure_ascii=ascii_only)
    assert read(raw) == read(*raw) == TEXT
    assert all(read(raw[:i], raw[i:]) == TEXT for i in range(len(raw)))


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60)))
def test_any_text(text, ascii_only, cuts):
    raw = json.dumps({"input": text}, ensure_ascii=ascii_only)
    places = [0, *sorted(cuts), len(raw)]
    assert read(*(raw[a:b] for a, b in pairwise(places))) == text


@given(st.text('"\\ud83e0x\n'), st.data())
def test_what_is_no_json_does_not_depend_on_the_cuts(text, data):
    raw = '{"input": "' + text + '"}'
    cut = data.draw(st.integers(0, len(raw)))
    assert read(raw[:cut], raw[cut:]) == read(raw) == read(*raw)


def test_text_comes_before_its_end():
    reader = FreeformInput()
    assert reader.feed('{ "input" :"*** Beg') == "*** Beg"
    assert reader.feed("in\\") == "in"
    assert reader.feed('nPatch"') == "\nPatch"
    assert reader.feed(', "x": "y"}') == ""
    assert reader.close() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ('"x"', "x"),
        ('{"why": "y", "input": "x"}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("*** Begin", "*** Begin"),
        ("", ""),
        ("{}", "{}"),
    ],
)
def test_arguments_of_another_form(arguments, text):
    assert read(arguments) == read(*arguments) == text


def test_a_cut_input_keeps_what_was_there():
    assert read('{"input": "ab\\u00') == "ab"
