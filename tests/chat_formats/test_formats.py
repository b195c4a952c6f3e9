"""Every format: calls, thoughts and text, under every split and every cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chat.text import TOOLS, check_cuts, check_splits, cut, gather, parse
from tests.support.chat.writers import RAW_STRINGS, WRITERS
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.parser import ChatParser

HERMES, PLAIN = FORMATS["hermes"], FORMATS["plain"]

ALL = pytest.mark.parametrize("name", list(WRITERS))
CALLS = [
    ("read", {"path": "a.txt", "limit": 3}),
    ("run", {"cmd": 'echo "ä\\n" </tool_call> {x}', "env": {"A": [1, {"b": None}]}}),
    ("run", {"cmd": "a\n\nb\n", "args": [], "dry": True, "scale": 0.5, "mode": "fast"}),
    ("now", {}),
]


def test_each_format_with_calls_is_tested_here():
    assert WRITERS.keys() == FORMATS.keys() - {"plain", "thinking"}


@ALL
def test_text_thoughts_and_several_calls(name):
    calls = CALLS[:1] + CALLS[3:]
    form = FORMATS[name]
    marks = form.thoughts
    thoughts = f"{marks.start}\nWhich file?\n{marks.end}\n\n" if marks else ""
    if name == "harmony":
        thoughts = "<|channel|>analysis<|message|>Which file?<|end|><|start|>assistant"
        thoughts += "<|channel|>commentary<|message|>"
    said = check_splits(form, f"{thoughts}I look.\n\n{WRITERS[name](calls)}")
    assert said.reasoning == ("Which file?" if thoughts else "")
    assert said.text == "I look."
    assert said.called == calls


@ALL
def test_a_call_that_is_cut_short(name):
    for call in CALLS:
        check_cuts(FORMATS[name], f"So: {WRITERS[name]([call])} and on")


# Harmony's headers are no text.
MARKED = pytest.mark.parametrize("name", [name for name in WRITERS if name != "harmony"])


@MARKED
def test_calls_are_text_where_the_request_has_no_tools(name):
    text = WRITERS[name](CALLS[:1])
    assert check_splits(FORMATS[name], text, tools=()).text == text


@MARKED
def test_a_call_of_an_unknown_tool_is_text(name):
    text = f"Hm. {WRITERS[name]([('erase', {'path': '/'})])} Done."
    said = check_splits(FORMATS[name], text)
    assert (said.text, said.calls) == (text, [])


@MARKED
def test_a_marker_without_a_call_is_text(name):
    form = FORMATS[name]
    for marker in form.call_starts:
        for text in (f"a {marker} b", f"a {marker}{{", marker, marker[:-1], f"x {marker[:3]}"):
            assert check_splits(form, text).text == text


def test_thoughts_that_the_prompt_began():
    text = "Hm, <b>.\n</think>\n\nYes. "
    said = check_splits(HERMES, text, in_reasoning=True)
    assert (said.reasoning, said.text) == ("Hm, <b>.", "Yes. ")
    assert HERMES.opens_reasoning("<think>\n\n</think>\nx<think>\n")
    assert not HERMES.opens_reasoning("<think>\n\n</think>\n")
    assert not HERMES.opens_reasoning("What does <think> do?<|im_end|>\n<|im_start|>assistant\n")
    assert not PLAIN.opens_reasoning("<think>\n")


def test_calls_and_markers_within_thoughts():
    call = WRITERS["hermes"]([("now", {})])
    for marker in "<tool_call>", "<tool_call>{", "<tool_call>\n{}":
        text = f"<think>\nI write {marker} here.\n{call}\nMore.\n</think>\n\nDone."
        said = check_splits(HERMES, text)
        assert (said.text, said.called) == ("Done.", [("now", {})])
        assert said.reasoning == f"I write {marker} here.\nMore."
    said = check_splits(HERMES, f"<think>\nLate? {call}")
    assert (said.reasoning, said.called) == ("Late?", [("now", {})])


@MARKED
def test_a_marker_that_begins_no_call_ends_with_itself(name):
    """The text after the marker is read as if the marker were a word."""
    form, call = FORMATS[name], WRITERS[name]([("now", {})])
    for marker in form.call_starts:
        for word in (f"{marker}", f"{marker}[", f"{marker}{{", f'{marker}{{"x": "', f"{marker} no"):
            if form.thoughts:
                start, end = form.thoughts.start, form.thoughts.end
                said = check_splits(form, f'{start}So {word}{end}Or "{word}" it.\n{call}Bye')
                assert (said.reasoning, said.called) == (f"So {word}", [("now", {})])
                assert said.text.startswith(f'Or "{word}" it.\n')
        parser = ChatParser(form, TOOLS)
        events = parser.feed(f"Write {marker} first.\nThen")
        assert gather(events).text == f"Write {marker} first.\nThen", "the text waits for more"


@pytest.mark.parametrize("name", [n for n in WRITERS if n != "harmony" and FORMATS[n].thoughts])
def test_thoughts_begin_before_text_only(name):
    form, call = FORMATS[name], WRITERS[name]([("now", {})])
    marks = form.thoughts
    literal = f"The tag `{marks.start}` opens, `{marks.end}` ends."
    thought = f"{marks.start}Hm.{marks.end}\n"
    for before in ("", f" \n{thought}", f"{thought}\n{thought}", f"{thought}{call}\n{thought}"):
        said = check_splits(form, f"{before}{literal}")
        assert said.text == literal
        assert said.reasoning == "\n".join(["Hm."] * before.count("Hm."))
    text = f"{marks.start} is a tag"
    assert check_splits(form, text).reasoning == "is a tag"
    assert check_splits(form, text, may_think=False).text == text


def test_what_a_grammar_does_not_hold_is_no_call():
    """It holds an answer after its thoughts; one of a given form is calls, or has none."""
    for name in WRITERS.keys() - {"harmony"}:
        form, call = FORMATS[name], WRITERS[name]([("now", {})])
        if form.thoughts:
            thought = f"{form.thoughts.start}Is it {call}?{form.thoughts.end}"
            said = check_splits(form, f"{thought}{call}", is_held=True)
            assert said.reasoning == f"Is it {call}?"
            assert said.called == [("now", {})]
        text = f'{{"a": "{call}"}}'
        if not form.bare_start:
            assert check_splits(form, text, is_held=True, calls_first=True).text == text
        said = check_splits(form, call, is_held=True, calls_first=True)
        assert said.called == [("now", {})]


def test_answers_that_go_on_within_thoughts():
    assert HERMES.is_thinking("<think>\n\n</think>\n<think>\nI lo")
    assert not HERMES.is_thinking("<think>\nI look.</think>\nWell,")
    assert not HERMES.is_thinking("")
    assert not HERMES.is_thinking("The tag <think> opens")


@pytest.mark.parametrize("text", ["  a\n b  \n", "", "\n", "a"])
def test_plain_text_is_passed_as_it_is(text):
    for form in PLAIN, FORMATS["llama3_json"]:
        assert check_splits(form, text).text == text


CUTS = st.lists(st.integers(0, 200))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@ALL
@settings(max_examples=30)
@given(
    call=st.sampled_from(CALLS)
    | st.builds(
        lambda cmd, env: ("run", {"cmd": cmd, "env": env}),
        st.text(max_size=20),
        st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    ),
    cuts=CUTS,
    before=st.sampled_from(["", "Hm.\n", "<think>a</think>\n"]),
)
def test_random_arguments_and_splits(name, call, cuts, before):
    if call not in CALLS:
        # Gemma's names have no marks around them.
        env = {} if "gemma" in name else call[1]["env"]
        cmd = call[1]["cmd"]
        if name in RAW_STRINGS:  # without escapes
            cmd = cmd.replace(RAW_STRINGS[name], "").replace("\r", "")
        call = ("run", {"cmd": cmd, "env": env})
    said = parse(FORMATS[name], cut(before + WRITERS[name]([call]), cuts))
    assert said.called == [call]


@ALL
@settings(max_examples=30)
@given(
    call=st.sampled_from(CALLS),
    start=st.integers(0, 150),
    length=st.integers(0, 30),
    twice=st.booleans(),
    cuts=CUTS,
)
def test_pieces_do_not_matter_where_a_model_slips(name, call, start, length, twice, cuts):
    text = f"Hm. {WRITERS[name]([call])} So. {WRITERS[name](CALLS[3:])}"
    end = start + length
    text = text[: end if twice else start] + text[start if twice else end :]
    whole = parse(FORMATS[name], text)
    assert parse(FORMATS[name], cut(text, cuts)) == whole
    assert parse(FORMATS[name], list(text)) == whole


@ALL
def test_markers_within_strings_are_text(name):
    form = FORMATS[name]
    marks = " ".join(m for m in form.markers if m != RAW_STRINGS.get(name))
    call = ("run", {"cmd": f"echo {marks} ok"})
    assert check_splits(form, WRITERS[name]([call])).called == [call]
