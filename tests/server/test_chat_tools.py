"""Tools and thoughts over chat completions, with the official client; answers are prepared."""

import asyncio
import json
import re

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.support.clients import OPTIONS
from tests.support.scripted_answers import hermes_call as call
from vllm_metal_lite.server.worker.client import EngineClient


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("run", cmd={"type": "string"}), tool("wait", seconds={"type": "integer"})]
ASK = {"model": "demo", "messages": [{"role": "user", "content": "Go on."}], "tools": TOOLS}
NAMED = {"type": "function", "function": {"name": "run"}}


@pytest.fixture(scope="module")
def client(script):
    with openai.OpenAI(base_url=f"{script.running.url}/v1", **OPTIONS) as client:
        yield client


ANSWER = (
    "<think>\nI look.\n</think>\n\nLet me see.\n"
    + call("run", cmd='echo "</tool_call>" \u00e9')
    + "\n"
    + call("wait", seconds=3)
)


def check(choice):
    message = choice.message
    assert (message.role, message.content) == ("assistant", "Let me see.")
    assert message.reasoning == message.reasoning_content == "I look."
    run, wait = message.tool_calls
    assert (run.type, run.function.name) == ("function", "run")
    assert json.loads(run.function.arguments) == {"cmd": 'echo "</tool_call>" \u00e9'}
    assert (wait.function.name, wait.function.arguments) == ("wait", '{"seconds": 3}')
    assert len({run.id, wait.id}) == 2
    assert choice.finish_reason == "tool_calls"


def gathered(chunks):
    """The choices that chunks come to, as a client without a library of its own adds them up."""
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found = choices.setdefault(
                choice.index, {"content": "", "thoughts": "", "calls": [], "end": None}
            )
            assert found["end"] is None, "a chunk behind the last"
            delta = choice.delta
            found["content"] += delta.content or ""
            found["thoughts"] += getattr(delta, "reasoning_content", None) or ""
            for piece in delta.tool_calls or ():
                if piece.id is not None:
                    assert piece.index == len(found["calls"])
                    assert (piece.type, piece.function.arguments) == ("function", "")
                    found["calls"].append([piece.function.name, ""])
                else:
                    assert (piece.type, piece.function.name) == (None, None)
                    assert piece.index == len(found["calls"]) - 1
                    assert piece.function.arguments
                    found["calls"][-1][1] += piece.function.arguments
            found["end"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_streamed_and_whole_answers_are_the_same(client, script, size):
    script.says(ANSWER, size=size)
    whole = client.chat.completions.create(**ASK)
    check(whole.choices[0])
    with client.chat.completions.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        check(stream.get_final_completion().choices[0])
    assert kinds.count("tool_calls.function.arguments.done") == 2
    chunks = list(
        client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    )
    [found] = gathered(chunks)
    message = whole.choices[0].message
    assert found == {
        "content": message.content,
        "thoughts": message.reasoning_content,
        "calls": [[c.function.name, c.function.arguments] for c in message.tool_calls],
        "end": "tool_calls",
    }
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    thoughts = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 < thoughts <= whole.usage.completion_tokens


def test_the_asynchronous_client(script):
    async def ask():
        url = f"{script.running.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, **OPTIONS) as client:
            whole = await client.chat.completions.create(**ASK)
            check(whole.choices[0])
            async with client.chat.completions.stream(**ASK) as stream:
                final = await stream.get_final_completion()
                check(final.choices[0])

    script.says(ANSWER)
    asyncio.run(ask())


def test_parsed_arguments(client, script):
    class Place(BaseModel):
        city: str

    script.says(call("Place", city="Oslo"))
    options = {**ASK, "tools": [openai.pydantic_function_tool(Place)]}
    message = client.chat.completions.parse(**options).choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == Place(city="Oslo")
    assert message.content is None


def test_several_answers_do_not_mix(client, script):
    texts = [ANSWER, "<think>\nNo.\n</think>\n\nDone.", call("run", cmd="ls")]
    script.says(*texts, *texts, size=5)
    whole = client.chat.completions.create(**ASK, n=3)
    streamed = gathered(client.chat.completions.create(**ASK, n=3, stream=True))
    assert [c.index for c in whole.choices] == [0, 1, 2]
    check(whole.choices[0])
    for choice, found in zip(whole.choices, streamed, strict=True):
        message = choice.message
        assert (found["content"], found["end"]) == (message.content or "", choice.finish_reason)
        assert found["thoughts"] == getattr(message, "reasoning", "")
        calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or ()]
        assert found["calls"] == calls
    assert [c.finish_reason for c in whole.choices] == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.parametrize("size", [1, 4, 10_000])
def test_every_token_has_its_scores(client, script, size):
    script.says(ANSWER, size=size)
    whole = client.chat.completions.create(**ASK, logprobs=True)
    scores = whole.choices[0].logprobs.content
    assert len(scores) == whole.usage.completion_tokens
    chunks = client.chat.completions.create(**ASK, logprobs=True, stream=True)
    streamed = [c.choices[0].logprobs for c in chunks]
    assert [s for found in streamed if found for s in found.content] == scores


@pytest.mark.parametrize("size", [1, 10_000])
def test_without_parallel_calls_an_answer_ends_behind_the_first(client, script, size):
    script.says(ANSWER + "More text.", size=size, end="length")
    options = {**ASK, "parallel_tool_calls": False}
    [choice] = client.chat.completions.create(**options).choices
    assert [c.function.name for c in choice.message.tool_calls] == ["run"]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    [found] = gathered(client.chat.completions.create(**options, stream=True))
    assert ([name for name, _ in found["calls"]], found["end"]) == (["run"], "tool_calls")


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("end", ["length", "stop"])
def test_a_call_that_is_cut_short_keeps_what_was_said(client, script, end, parallel):
    whole = call("run", cmd="rm -r old")
    options = {**ASK, "parallel_tool_calls": parallel}
    for at in range(len('<tool_call>\n{"name": "run", '), len(whole) - len("}\n</tool_call>")):
        script.says(whole[:at], end=end)
        [choice] = client.chat.completions.create(**options).choices
        [cut] = choice.message.tool_calls
        with pytest.raises(json.JSONDecodeError):
            json.loads(cut.function.arguments)
        assert choice.finish_reason == end
        [found] = gathered(client.chat.completions.create(**options, stream=True))
        assert found["calls"] == [["run", cut.function.arguments]]
        assert found["end"] == end


@pytest.mark.parametrize("parallel", [True, False])
def test_a_malformed_call_goes_to_the_client_which_tells_the_model(client, script, parallel):
    bad = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"} oops}\n</tool_call>'
    script.says(bad)
    options = {**ASK, "parallel_tool_calls": parallel}
    [choice] = client.chat.completions.create(**options).choices
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.tool_calls[0].function.arguments)
    assert choice.finish_reason == "tool_calls"


def test_calls_of_other_tools_are_text(client, script):
    script.says(call("format_disk", now=True))
    [choice] = client.chat.completions.create(**ASK).choices
    assert choice.message.content == script.texts[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


@pytest.mark.parametrize("changes", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
def test_calls_that_nobody_wants_are_text(client, script, changes):
    script.says(ANSWER)
    [choice] = client.chat.completions.create(**{**ASK, **changes}).choices
    assert choice.message.reasoning == "I look."
    assert choice.message.content == ANSWER.partition("</think>\n\n")[2]
    assert choice.finish_reason == "stop"


def test_where_thoughts_have_begun(client, script):
    """A question that names the marker begins none; an answer that goes on may be in the middle."""
    script.says("I look.</think>Fine.")
    asked = {"model": "demo", "messages": [{"role": "user", "content": "What does <think> do?"}]}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content == script.texts[0]
    asked["messages"].append({"role": "assistant", "content": "<think>\nSo"})
    options = {"continue_final_message": True, "add_generation_prompt": False}
    message = client.chat.completions.create(**asked, extra_body=options).choices[0].message
    assert (message.reasoning, message.content) == ("I look.", "Fine.")


def form(script):
    return script.requests[-1].params.structured_outputs


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["run", "wait"]),
        (NAMED, ["run"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
         ["run"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("thinks", [False, True])
def test_demanded_calls_follow_a_grammar(client, script, choice, names, thinks, monkeypatch):
    monkeypatch.setattr(EngineClient, "thinks", property(lambda self: thinks))
    script.says(call("run", cmd="ls"))
    client.chat.completions.create(**ASK, tool_choice=choice)
    # The rules of the calls that may come.
    calls = re.search("^call: .*$", form(script).grammar, re.MULTILINE)[0]
    assert re.findall(r"call_(\d)", calls) == [str(i) for i in range(len(names))]
    assert all(f'{name}\\"' in form(script).grammar for name in names)
    assert (script.requests[-1].params.thinking is not None) == thinks


def test_other_tools_than_those_allowed_are_text_though_the_model_is_shown_them(client, script):
    script.says(call("run", cmd="ls") + call("wait", seconds=1))
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    [found] = client.chat.completions.create(**ASK, tool_choice=choice).choices
    assert [c.function.name for c in found.message.tool_calls] == ["run"]
    assert found.message.content == call("wait", seconds=1)
    prompt = script.requests[-1].prompt_token_ids
    client.chat.completions.create(**ASK)
    assert script.requests[-1].prompt_token_ids == prompt


def test_nothing_is_forced_unless_it_is_asked_for(client, script):
    script.says("Fine.")
    client.chat.completions.create(**ASK)
    assert form(script) is None
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    client.chat.completions.create(**{**ASK, "tools": [strict]})
    assert form(script).grammar


def test_a_budget_of_thoughts(client, script):
    script.says("Fine.")
    client.chat.completions.create(**ASK, extra_body={"thinking_token_budget": 20})
    assert script.requests[-1].params.thinking.budget == 20
    assert form(script) is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": 5}, "tools", "valid array"),
        ({"tools": [5]}, "tools.0.type", "must be 'function', got None"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type", "'custom'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "got None"),
        ({"tools": [tool("a"), tool("a")]}, "tools.1.function.name", "another tool"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
         "tools.0.function.parameters", "must be an object"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters":
            {"properties": [1]}}}]},
         "tools.0.function.parameters.properties", "must be an object, got [1]"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters":
            {"required": 5}}}]},
         "tools.0.function.parameters.required", "must be a list, got 5"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]},
         "tools.0.function.description", "must be a string, got 1"),
        ({"tool_choice": "sometimes"}, "tool_choice", "got 'sometimes'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "must be 'none'"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name", "does not have: 'x'"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "without any"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
         "tool_choice.allowed_tools", "must have a mode"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
        ({"functions": [{"name": "run"}]}, "functions", "not supported"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "got -1"),
        ({"reasoning_effort": 5}, "reasoning_effort", "valid string"),
        ({"tools": [tool("a", x={"type": "odd"})], "tool_choice": "required"}, "tools", "odd"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
         "messages.0.tool_calls.0", "a function with a name"),
    ],
)  # fmt: skip
def test_bad_requests_name_the_field(script, fields, param, words):
    script.says("Fine.")
    reply = httpx.post(
        f"{script.running.url}/v1/chat/completions", json={**ASK, **fields}, timeout=60
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
