"""Tools and thoughts over all chat APIs, with the official clients; answers are prepared."""

import re

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.support.server.chat_apis import (
    ANSWER,
    APIS,
    ASKED,
    PARTS,
    SAID,
    Chat,
    Messages,
    Responses,
    gathered,
)
from tests.support.server.command import eventually
from tests.support.server.scripted import hermes_call as call


@pytest.fixture(params=APIS, ids=lambda api: api.__name__)
def api(request, script):
    api = request.param(script.running.url)
    with api.client:
        yield api


class Place(BaseModel):
    city: str


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_streamed_and_whole_answers_are_the_same(api, script, size):
    script.says(ANSWER, size=size)
    whole = api.whole()
    assert (whole.parts, whole.end) == (PARTS, "tool_calls")
    gathered = api.gathered()
    assert whole.num_tokens == gathered.num_tokens == len(script.pieces())
    assert api.streamed() == gathered == whole


async def test_the_asynchronous_client(api, script):
    script.says(ANSWER)
    for reply in await api.asked():
        assert (reply.parts, reply.end) == (PARTS, "tool_calls")


@pytest.mark.parametrize("size", [1, 10_000])
def test_without_parallel_calls_an_answer_ends_behind_the_first(api, script, size):
    def successes():
        lines = script.running.server.metrics.text("")[0].decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if "request_success_total{" in line)

    script.says(ANSWER + "More text.", size=size, end="length")
    before = successes()
    for reply in api.whole(parallel=False), api.gathered(parallel=False):
        assert (reply.parts, reply.end) == (PARTS[:-1], "tool_calls")
    eventually(lambda: successes() == before + 2)


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


def test_arguments_may_hold_half_of_a_surrogate_pair(api, script):
    script.says('<tool_call>{"name": "run", "arguments": {"cmd": "\\ud800"}}</tool_call>')
    assert api.whole().parts == api.gathered().parts == [("call", "run", {"cmd": "\ud800"})]


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
def test_demanded_calls_follow_a_grammar(api, script, choice, names, thinks):
    script.says(call("run", cmd="ls"))
    script.running.model.thinks = thinks
    api.whole(choice=choice)
    del script.running.model.thinks  # which is found again
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


@pytest.mark.parametrize(
    ("api", "fields", "budget"),
    [
        (Chat, {"extra_body": {"thinking_token_budget": 20}}, 20),
        (Messages, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        (Messages, {"thinking": {"type": "adaptive"}}, None),
        (Messages, {"thinking": {"type": "disabled"}}, None),
    ],
)
def test_a_budget_of_thoughts(script, api, fields, budget):
    script.says("Fine.")
    api(script.running.url).create(**fields)
    params = script.requests[-1].params
    assert (params.thinking and params.thinking.budget) == budget
    assert params.structured_outputs is None


# Chat completions


@pytest.fixture
def chat(script):
    return Chat(script.running.url)


def test_parsed_arguments(chat, script):
    script.says(call("Place", city="Oslo"))
    asked = {**chat.request(), "tools": [openai.pydantic_function_tool(Place)]}
    message = chat.of(chat.client).parse(**asked).choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == Place(city="Oslo")
    assert message.content is None
    other = Responses(script.running.url)
    asked = {**other.request(), "tools": [openai.pydantic_function_tool(Place)]}
    [item] = other.of(other.client).parse(**asked).output
    assert item.parsed_arguments == Place(city="Oslo")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_of_calls_has_no_content(chat, script, size):
    """Some clients make an empty text of `""`."""
    script.says(call("run", cmd="ls"), size=size)
    deltas = [c.choices[0].delta for c in chat.create(stream=True)]
    assert deltas[0].role == "assistant"
    assert any(delta.tool_calls for delta in deltas)
    assert {delta.content for delta in deltas} == {None}


def test_several_answers_do_not_mix(chat, script):
    texts = [ANSWER, "<think>\nNo.\n</think>\n\nDone.", call("run", cmd="ls")]
    script.says(*texts, *texts, size=5)
    whole = chat.create(n=3)
    streamed = gathered(chat.create(n=3, stream=True))
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert [found["content"] for found in streamed] == ["Let me see.", "Done.", ""]
    for choice, found in zip(whole.choices, streamed, strict=True):
        message = choice.message
        assert (found["content"], found["end"]) == (message.content or "", choice.finish_reason)
        assert found["thoughts"] == getattr(message, "reasoning", "")
        calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or ()]
        assert found["calls"] == calls
    assert [c.finish_reason for c in whole.choices] == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_every_token_has_its_scores(chat, script, size):
    script.says(ANSWER, size=size)
    whole = chat.create(logprobs=True)
    scores = whole.choices[0].logprobs.content
    assert len(scores) == whole.usage.completion_tokens
    chunks = chat.create(logprobs=True, stream=True)
    streamed = [c.choices[0].logprobs for c in chunks]
    assert [s for found in streamed if found for s in found.content] == scores


def test_where_thoughts_have_begun(chat, script):
    """A marker in a question opens no thoughts.  A continued answer may be inside thoughts."""
    script.says("I look.</think>Fine.")
    asked = [{"role": "user", "content": "What does <think> do?"}]
    message = chat.create(messages=asked, tools=[]).choices[0].message
    assert message.content == script.texts[0]
    asked.append({"role": "assistant", "content": "<think>\nSo"})
    options = {"continue_final_message": True, "add_generation_prompt": False}
    message = chat.create(messages=asked, tools=[], extra_body=options).choices[0].message
    assert (message.reasoning, message.content) == ("I look.", "Fine.")


@pytest.mark.parametrize("api", [Chat, Responses])
def test_other_tools_than_those_allowed_are_text_though_the_model_is_shown_them(api, script):
    api = api(script.running.url)
    script.says(call("run", cmd="ls") + call("wait", seconds=1))
    run = {"type": "function", "function": {"name": "run"}, "name": "run"}
    allowed = {"mode": "auto", "tools": [run]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed, **allowed}
    reply = api.read(api.create(tool_choice=choice))
    assert ("call", "run", {"cmd": "ls"}) in reply.parts
    assert ("text", call("wait", seconds=1)) in reply.parts
    prompt = script.requests[-1].prompt_token_ids
    api.create()
    assert script.requests[-1].prompt_token_ids == prompt


def test_nothing_is_forced_unless_it_is_asked_for(chat, script):
    script.says("Fine.")
    chat.create()
    assert script.requests[-1].params.structured_outputs is None
    [run, _] = chat.request()["tools"]
    chat.create(tools=[{**run, "function": {**run["function"], "strict": True}}])
    assert script.requests[-1].params.structured_outputs.grammar


# Anthropic's messages


@pytest.fixture
def messages(script):
    return Messages(script.running.url)


def test_the_beta_client(messages, script):
    script.says(ANSWER)
    betas = ["interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"]
    betas += ["effort-2025-11-24"]
    asked = {**messages.request(), "betas": betas, "thinking": {"type": "adaptive"}}
    beta = messages.client.beta.messages
    whole = beta.create(**asked)
    assert messages.read(whole).parts == PARTS
    with beta.stream(**asked) as stream:
        final = stream.get_final_message()
    assert messages.read(final).parts == PARTS
    assert final.stop_reason == whole.stop_reason == "tool_use"
    del asked["max_tokens"]
    assert beta.count_tokens(**asked).input_tokens == whole.usage.input_tokens


def test_the_clients_own_loop_runs_tools_and_gives_results_back(messages, script):
    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    script.says("<think>\nI add.\n</think>\n\n" + call("add", a=2, b=3), "It is 5.")
    asked = {"model": "demo", "max_tokens": 1000, "messages": [ASKED], "tools": [add]}
    final = messages.client.beta.messages.tool_runner(**asked).until_done()
    assert final.content[0].text == "It is 5."
    assert final.stop_reason == "end_turn"


def test_thoughts_between_calls_are_blocks_of_their_own(messages, script):
    script.says("<think>\nA\n</think>\n\n" + call("run", cmd="ls") + "<think>\nB\n</think>\nC")
    blocks = messages.create().content
    assert [b.type for b in blocks] == ["thinking", "tool_use", "thinking", "text"]


def test_unknown_fields_of_tools_change_nothing(messages, script):
    script.says(call("run", cmd="ls"))
    asked = messages.request()
    caching = {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    asked["tools"][0] |= {**caching, "type": "custom", "description": "A tool."}
    assert messages.client.messages.create(**asked).stop_reason == "tool_use"
    del asked["max_tokens"]
    messages.client.messages.count_tokens(**asked)
