"""Bad requests to all endpoints: errors name the field, the value and the limit."""

import pytest

from tests.support.server.kit import user

HI = [{"role": "user", "content": "hi"}]
RUN = {"name": "run", "input_schema": {}}


def function(**fields):
    return {"type": "function", "function": {"name": "a", **fields}}


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


SCHEMA = "response_format.json_schema.schema"
NESTED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
TOOLS, OURS = {"tools": [function()]}, {"tools": [RUN]}

# By path: a body that is served, and rows of (changes, the error's param, words); without a param
# if the API shows none, or the words name the field.  A field of ... is left out.
BAD = {
    "/v1/chat/completions": ({"messages": HI}, [
        ({"temperature": -1}, "temperature", "must be a number >= 0, got -1"),
        ({"temperature": "1"}, "temperature", "got '1'"),
        ({"temperature": True}, "temperature", "got True"),
        ({"n": 0}, "n", "must be an integer from 1 to 128, got 0"),
        ({"n": 1.5}, "n", "got 1.5"),
        ({"top_p": 2}, "top_p", "at most 1, got 2"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_tokens (2), got 3"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20, got 21"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": 3}, "logprobs", "got 3"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "got {'x': 1}"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "'01': 2"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "vocabulary's size, 2048, got 5000"),
        ({"stop": ""}, "stop", "non-empty string"),
        ({"seed": 2**64}, "seed", "64 bits"),
        ({"priority": "high"}, "priority", "got 'high'"),
        ({"stream": "yes"}, "stream", "got 'yes'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not supported with stream"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "must be an object, got None"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema", "an object"),
        ({"response_format": json_schema([1])}, SCHEMA, "must be an object, got [1]"),
        ({"response_format": json_schema(NESTED)}, f"{SCHEMA}.properties.a", "uniqueItems"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
         "response_format", "cannot both"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "json and reg"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "has no field 'regexp'"),
        ({"structured_outputs": "yes"}, "structured_outputs", "got 'yes'"),
        ({"cache_salt": ""}, "cache_salt", "must be a non-empty string, got ''"),
        ({"cache_salt": ["a"]}, "cache_salt", "got ['a']"),
        ({"chat_template_kwargs": {"tokenize": 0}}, "chat_template_kwargs", "cannot set tokenize"),
        ({"chat_template_kwargs": {"messages": 0}}, "chat_template_kwargs", "cannot set messages"),
        ({"messages": []}, "messages", "at least one dict with role and content, got []"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "got None"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "got 5"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]},
         "messages.0.content.0", "text only, got a part of type 'image_url'"),
        ({"messages": [user([{"type": "refusal", "refusal": 5}])]},
         "messages.0.content.0.refusal", "must be a string, got 5"),
        ({"messages": "hi"}, "messages", "got 'hi'"),
        ({"messages": [user("word " * 5000)]}, "messages", "maximum context length is 4096"),
        ({"model": "other"}, "model", "`other` does not exist"),
        ({"tools": 5}, "tools", "valid array"),
        ({"tools": [5]}, "tools.0.type", "must be 'function', got None"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type", "'custom'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "got None"),
        ({"tools": [function(), function()]}, "tools.1.function.name", "two tools have"),
        ({"tools": [function(parameters=[])]}, "tools.0.function.parameters", "must be an object"),
        ({"tools": [function(parameters={"properties": [1]})]},
         "tools.0.function.parameters.properties", "must be an object, got [1]"),
        ({"tools": [function(parameters={"required": 5})]},
         "tools.0.function.parameters.required", "must be a list, got 5"),
        ({"tools": [function(description=1)]}, "tools.0.function.description", "got 1"),
        ({**TOOLS, "tool_choice": "sometimes"}, "tool_choice", "got 'sometimes'"),
        ({**TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice", "must be 'auto'"),
        ({**TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name", "names 'x', which is not in tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "but the request has no tools"),
        ({**TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
         "tool_choice.allowed_tools.tools", "must be a list"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
        ({"functions": [{"name": "run"}]}, "functions", "not supported"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "got -1"),
        ({"reasoning_effort": 5}, "reasoning_effort", "valid string"),
        ({"tools": [function(parameters={"properties": {"x": {"type": "odd"}}})],
          "tool_choice": "required"}, "tools", "odd"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
         "messages.0.tool_calls.0", "a function with a name"),
    ]),
    "/v1/completions": ({"prompt": "x"}, [
        ({"cache_salt": 5}, "cache_salt", "got 5"),
        ({"prompt": None}, "prompt", "got None"),
        ({"prompt": []}, "prompt", "got []"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": ["a", 1]}, "prompt.1", "got 1"),
        ({"prompt": [[1, True]]}, "prompt.0", "got [1, True]"),
        ({"prompt": [1, 2048]}, "prompt", "token id 2048 is outside the vocabulary of 2048"),
        ({"prompt": "word " * 5000}, "prompt", "maximum context length is 4096"),
        ({"prompt": ["a"] * 300}, "prompt", "need 300 answers, and at most 264 may run or wait"),
        ({"prompt": ["a", "word " * 5000]}, "prompt", "maximum context length is 4096"),
        ({"suffix": "x"}, "suffix", "not supported, got 'x'"),
        ({"best_of": 2}, "best_of", "must equal n (1), got 2"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20, got 21"),
        ({"logprobs": True}, "logprobs", "got True"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"temperature": []}, "temperature", "got []"),
    ]),
    "/v1/responses": ({"input": "x"}, [
        ({"cache_salt": 5}, "cache_salt", "got 5"),
        ({"input": 5}, "input must be a string or a list of items, got 5"),
        ({"input": [5]}, "input.0 must be an object, got 5"),
        ({"input": ...}, "input: Field required"),
        ({"input": []}, "input", "is empty"),
        ({"max_output_tokens": 0}, "max_output_tokens must be"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20"),
        ({"previous_response_id": "resp_1"}, "no response is stored"),
        ({"background": True}, "background: not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type must be text"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema must be"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0: item_reference"),
        ({"input": [{"type": "hologram"}]}, "'hologram' are not supported"),
        ({"input": [user([{"type": "input_image"}])]}, "input.0.content.0: this server takes text"),
        ({"input": "x" * 20_000}, "input", "maximum context length is 4096"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort", "got 5"),
        ({"input": [{"type": "additional_tools", "tools": 5}]}, "input.0.tools", "got 5"),
    ]),
    "/v1/messages": ({"messages": HI, "max_tokens": 12}, [
        ({"cache_salt": 5}, "cache_salt must be a non-empty string, got 5"),
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "at least one dict with role and content, got []"),
        ({"temperature": -1}, "temperature must be"),
        ({"stop_sequences": 5}, "stop_sequences must be"),
        ({"system": 5}, "system must be a string or a list of parts, got 5"),
        ({"system": 0}, "system must be a string or a list of parts, got 0"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"messages": [user([{"type": "image"}])]}, "messages.0.content.0: this server takes text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role must be user"),
        ({"messages": [user("x" * 20_000)]}, "prompt is too long"),
        ({"max_tokens": ...}, "max_tokens: Field required"),
        ({"tools": [5]}, "tools.0 must be an object"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools.0: tools of type 'web_search_20250305' are not supported"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name must be"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools.0.input_schema must be an object"),
        ({"tools": [RUN, RUN]}, "tools.1.name: two tools have"),
        ({**OURS, "tool_choice": {"type": "some"}}, "tool_choice.type must be auto, any, tool or"),
        ({**OURS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name names 'x'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice demands a call, but"),
        ({**OURS, "tool_choice": "any"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must be"),
        ({"thinking": {"type": "maybe"}}, "thinking.type must be"),
        ({"thinking": True}, "thinking"),
        ({"model": "other"}, "`other` does not exist"),
    ]),
    "/tokenize": ({}, [
        ({}, "prompt or messages must be given"),
        ({"prompt": "x", "messages": HI}, "and not both"),
        ({"prompt": 5}, "got 5"),
        ({"prompt": "x " * 40_000}, "prompt", "maximum context length is 4096"),
        ({"messages": [user("x " * 40_000)]}, "messages", "maximum context length is 4096"),
    ]),
    "/detokenize": ({}, [
        ({"tokens": ...}, "tokens"),
        ({"tokens": [2048]}, "token id 2048 is outside the vocabulary of 2048"),
        ({"tokens": [-1]}, "token id -1 is outside"),
        ({"tokens": "x"}, "tokens", "got 'x'"),
        ({"tokens": ["x"] * 9}, "tokens", "must be integers, got 'x'"),
    ]),
}  # fmt: skip


@pytest.fixture(scope="module")
def running(script):
    return script.running


@pytest.mark.parametrize(
    ("path", "base", "changes", "expected"),
    [
        (path, base, changes, expected)
        for path, (base, rows) in BAD.items()
        for changes, *expected in rows
    ],
    ids=lambda value: str(value)[:60],
)
def test_errors_name_the_field_the_value_and_the_limit(script, http, path, base, changes, expected):
    body = {name: value for name, value in {**base, **changes}.items() if value is not ...}
    script.says("Fine.")
    reply = http.post(path, json=body)
    whole, (*param, words) = reply.json(), expected
    error, is_unknown = whole["error"], "model" in changes
    assert reply.status_code == (404 if is_unknown else 400), reply.text
    assert words in error["message"]
    assert error["type"] == ("not_found_error" if is_unknown else "invalid_request_error")
    assert whole.get("type") == ("error" if path == "/v1/messages" else None)
    assert not param or [error["param"]] == param
