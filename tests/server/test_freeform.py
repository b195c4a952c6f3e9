"""The input of freeform tools is read from JSON while it is written, however it is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal_lite.server.openai_api.response_tools import FreeformInput

PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-x = "\\n"\n+x = "é 😀"\n*** End Patch\n'


def read(*pieces):
    reader = FreeformInput()
    return "".join([*map(reader.feed, pieces), reader.close()])


@pytest.mark.parametrize("ascii_only", [True, False])
def test_every_cut_gives_the_same(ascii_only):
    raw = json.dumps({"input": PATCH}, ensure_ascii=ascii_only)
    assert read(raw) == read(*raw) == PATCH
    assert all(read(raw[:i], raw[i:]) == PATCH for i in range(len(raw)))


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
