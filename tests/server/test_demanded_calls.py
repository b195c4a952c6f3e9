"""Calls that a request demands, written by a model that knows nothing of tools."""

import json
import math
from functools import partial

import anthropic
import openai
import pytest

from tests.support.server.kit import OPTIONS
from vllm_metal_lite.chat_formats.detect import FORMATS

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "mode": {"enum": ["fast", "slow"]}},
    "required": ["on", "mode"],
    "additionalProperties": False,
}


def tool(name, parameters, **fields):
    function = {"name": name, "parameters": parameters, **fields}
    return {"type": "function", "function": function}


RUN, WAIT = tool("run", SCHEMA), tool("wait", {"type": "object"})
ASK = {"model": "demo", "messages": [{"role": "user", "content": "Go on."}]}
NAMED = {"type": "function", "function": {"name": "run"}}


# Their markers are plain text to the demo model, as to models that were not trained on them.
FORMAT_NAMES = [
    "hermes",
    "qwen3_coder",
    "mistral",
    "kimi_k2",
    "llama3_json",
    "deepseek_v31",
    "glm45",
]


@pytest.fixture(params=FORMAT_NAMES)
def chat_format(request, running):
    running.model.chat_format = FORMATS[request.param]
    return request.param


def is_right(arguments):
    return arguments.keys() == {"on", "mode"} and type(arguments["on"]) is bool


@pytest.mark.usefixtures("chat_format")
def test_a_named_tool_is_called_by_its_schema(client):
    ask = {**ASK, "tools": [RUN, WAIT], "tool_choice": NAMED, "parallel_tool_calls": False}
    ask |= {"seed": 1, "max_tokens": 400, "extra_body": {"thinking_token_budget": 4}}
    [choice] = client.chat.completions.create(**ask).choices
    [call] = choice.message.tool_calls
    assert call.function.name == "run"
    assert is_right(json.loads(call.function.arguments))
    assert choice.finish_reason == "tool_calls"
    with client.chat.completions.stream(**ask) as stream:
        [streamed] = stream.get_final_completion().choices
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments


@pytest.mark.usefixtures("chat_format")
def test_a_call_of_any_tool_over_messages(running):
    with anthropic.Anthropic(base_url=running.url, **OPTIONS) as client:
        run = {"name": "run", "input_schema": SCHEMA}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        message = client.messages.create(**ASK, max_tokens=400, tools=[run], tool_choice=choice)
    assert message.stop_reason == "tool_use"
    assert is_right(message.content[-1].input)


@pytest.mark.usefixtures("chat_format")
def test_without_tools_to_call_no_call_begins(client):
    ask = {**ASK, "tools": [RUN], "tool_choice": "none", "max_tokens": 20}
    [choice] = client.chat.completions.create(**ask).choices
    assert choice.message.tool_calls is None


SCHEMAS = {
    "an integer beyond floats": ({"const": 2**53 + 1}, ".const: 9007199254740993 cannot be kept"),
    "a number beyond floats": ({"enum": [1, math.inf]}, ".enum.1: inf cannot be kept"),
    "a missing keyword": ({"type": "array", "contains": {}}, ": keywords that are not"),
    "parts that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ": oneOf needs"),
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("choice", ["required", "auto"], ids=["demanded", "strict"])
def test_a_schema_that_cannot_be_followed_is_named(running, http, name, choice):
    running.model.chat_format = FORMATS["hermes"]
    schema, words = SCHEMAS[name]
    parameters = {"type": "object", "properties": {"code": schema}, "required": ["code"]}
    tools = [RUN, tool("look", parameters, strict=choice == "auto")]
    asked = {**ASK, "tools": tools, "tool_choice": choice, "max_tokens": 5}
    body = json.dumps(asked).replace("Infinity", "1e400")
    refused = http.post("/v1/chat/completions", content=body)
    error = refused.json()["error"]
    assert f"tools: 'look'.properties.code{words}" in error["message"]
    assert error["param"] == "tools"


@pytest.mark.usefixtures("chat_format")
def test_a_tool_that_is_not_strict_may_have_a_set(http):
    """Items of Pydantic's sets must differ, which no grammar can guarantee."""
    parameters = {"properties": {"tags": {"type": "array", "uniqueItems": True, "maxItems": 2}}}
    for strict in False, True:
        asked = {**ASK, "tools": [tool("look", parameters, strict=strict)], "max_tokens": 5}
        reply = http.post("/v1/chat/completions", json={**asked, "tool_choice": "required"})
        assert reply.status_code == (400 if strict else 200), reply.text


@pytest.mark.usefixtures("chat_format")
@pytest.mark.parametrize("nested", [False, True])
def test_a_call_has_no_keys_but_those_of_its_schema(client, nested):
    """Pydantic's schemas allow other keys, and small models would invent them without end."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    if nested:
        point = {"$defs": {"P": schema}, "properties": {"p": {"$ref": "#/$defs/P"}}}
        schema = {"type": "object", "required": ["p"], **point}
    ask = {**ASK, "tools": [tool("run", schema)], "tool_choice": NAMED, "max_tokens": 400}
    for seed in range(4):
        [choice] = client.chat.completions.create(**ask, seed=seed, temperature=1.5).choices
        found = json.loads(choice.message.tool_calls[0].function.arguments)
        assert set(found["p"] if nested else found) <= {"a"}


def test_numbers_of_arguments_are_exact_or_refused(client, chat_format):
    """Formats that do not write values as JSON have no limit."""
    parameters = {"type": "object", "properties": {"id": {"enum": [2**53 + 1]}}, "required": ["id"]}
    ask = {**ASK, "tools": [tool("run", parameters)], "tool_choice": "required"}
    ask |= {"parallel_tool_calls": False, "seed": 1, "max_tokens": 400}
    create = partial(client.chat.completions.create, **ask)
    if chat_format in ("qwen3_coder", "glm45"):
        [call] = create().choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"id": 2**53 + 1}
        return
    with pytest.raises(openai.BadRequestError, match=r"'run'.*9007199254740993 cannot be kept"):
        create()
