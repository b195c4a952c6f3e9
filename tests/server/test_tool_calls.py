"""Tools and thoughts over all chat APIs, with the official clients; answers are prepared."""

import asyncio
import re

import pytest

from tests.support.chat_apis import ANSWER, APIS, PARTS, SAID, Responses
from tests.support.scripted_answers import hermes_call as call
from vllm_metal_lite.server.worker.client import EngineClient


@pytest.fixture(params=APIS, ids=lambda api: api.__name__)
def api(request, script):
    api = request.param(script.running.url)
    with api.client:
        yield api


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_streamed_and_whole_answers_are_the_same(api, script, size):
    script.says(ANSWER, size=size)
    whole = api.whole()
    assert (whole.parts, whole.end) == (PARTS, "tool_calls")
    gathered = api.gathered()
    assert whole.num_tokens == gathered.num_tokens == len(script.pieces())
    assert api.streamed() == gathered == whole


def test_the_asynchronous_client(api, script):
    script.says(ANSWER)
    for reply in asyncio.run(api.asked()):
        assert (reply.parts, reply.end) == (PARTS, "tool_calls")


@pytest.mark.parametrize("size", [1, 10_000])
def test_without_parallel_calls_an_answer_ends_behind_the_first(api, script, size):
    script.says(ANSWER + "More text.", size=size, end="length")
    for reply in api.whole(parallel=False), api.gathered(parallel=False):
        assert (reply.parts, reply.end) == (PARTS[:-1], "tool_calls")


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("end", ["length", "stop"])
def test_a_call_that_is_cut_short_keeps_what_was_said_and_cannot_run(api, script, end, parallel):
    whole = call("run", cmd="rm -r old")
    for at in range(len('<tool_call>\n{"name": "run", '), len(whole) - len("}\n</tool_call>"), 2):
        script.says(whole[:at], end=end)
        reply = api.whole(parallel=parallel)
        [(_, name, arguments)] = reply.parts
        assert (name, reply.end) == ("run", end)
        assert isinstance(arguments, str), "they are JSON"
        assert api.gathered(parallel=parallel).parts == reply.parts


@pytest.mark.parametrize("parallel", [True, False])
def test_a_malformed_call_goes_to_the_client_which_tells_the_model(api, script, parallel):
    script.says('<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"} oops}\n</tool_call>')
    reply = api.whole(parallel=parallel)
    [(_, name, arguments)] = reply.parts
    end = "stop" if isinstance(api, Responses) else "tool_calls"  # the item says "incomplete"
    assert (name, type(arguments), reply.end) == ("run", str, end)


def test_calls_of_other_tools_are_text(api, script):
    script.says(call("format_disk", now=True))
    reply = api.whole()
    assert (reply.parts, reply.end) == ([("text", script.texts[0])], "stop")


@pytest.mark.parametrize("how", [{"tools": {}}, {"choice": "none"}], ids=str)
def test_calls_that_nobody_wants_are_text(api, script, how):
    script.says(ANSWER)
    reply = api.whole(**how)
    assert (reply.parts, reply.end) == ([PARTS[0], ("text", SAID)], "stop")


@pytest.mark.parametrize(("choice", "names"), [("required", ["run", "wait"]), ("run", ["run"])])
@pytest.mark.parametrize("thinks", [False, True])
def test_demanded_calls_follow_a_grammar(api, script, choice, names, thinks, monkeypatch):
    monkeypatch.setattr(EngineClient, "thinks", property(lambda self: thinks))
    script.says(call("run", cmd="ls"))
    api.whole(choice=choice)
    params = script.requests[-1].params
    # The rules of the calls that may come.
    calls = re.search("^call: .*$", params.structured_outputs.grammar, re.MULTILINE)[0]
    assert re.findall(r"call_(\d)", calls) == [str(i) for i in range(len(names))]
    assert all(f'{name}\\"' in params.structured_outputs.grammar for name in names)
    assert (params.thinking is not None) == thinks


def test_an_empty_answer(api, script):
    script.says("")
    for reply in api.whole(), api.gathered():
        assert (reply.parts, reply.end) == ([], "stop")


NOW = call("now")


# An answer, and what a user reads of it.
@pytest.mark.parametrize(
    ("answer", "thoughts", "text"),
    [
        (f"One.{NOW}Two.", "", "One.\nTwo."),
        (f"One.\n\n{NOW}\n{NOW}\nTwo.", "", "One.\n\nTwo."),
        (f"<think>\nA.\n</think>\n\nOne. {NOW}<think>B.</think>Two.", "A.\nB.", "One. Two."),
        (f"<think>A.{NOW}B.</think>{NOW}", "A.\nB.", ""),
    ],
)
def test_texts_around_a_call_stay_apart(api, script, answer, thoughts, text):
    script.says(answer, size=2)
    for reply in api.whole(tools={"now": {}}), api.streamed(tools={"now": {}}):
        assert (reply.joined("thoughts"), reply.joined("text")) == (thoughts, text)
