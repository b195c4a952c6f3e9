"""Tools and thoughts over chat completions, with the official client; answers are prepared."""

import openai
import pytest
from pydantic import BaseModel

from tests.support.chat_apis import ANSWER, gathered
from tests.support.clients import OPTIONS
from tests.support.scripted_answers import hermes_call as call


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
    assert [found["content"] for found in streamed] == ["Let me see.", "Done.", ""]
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


def test_where_thoughts_have_begun(client, script):
    """A question that names the marker begins none; a continued answer may be in the middle."""
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
