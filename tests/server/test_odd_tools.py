"""Unusual definitions of tools, and unusual messages about calls: served, or refused with 400."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.server.raw_http import CHAT
from vllm_metal_lite import EngineConfig
from vllm_metal_lite.chat_formats.detect import FORMATS

SERVING = {"engine": EngineConfig(num_blocks=64, max_num_seqs=8, max_model_len=256)}
HI = {"role": "user", "content": "hi"}


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


SCHEMAS = {
    "none": None,
    "empty": {},
    "no object": {"type": "string"},
    "a list": [],
    "a string": "object",
    "an unknown type": {"type": "odd"},
    "properties that are a list": {"type": "object", "properties": [1]},
    "properties that are no schemas": {"properties": {"a": 5, "b": None, "c": "x", "d": True}},
    "required that is a string": {"properties": {"a": {}}, "required": "a"},
    "required that is unknown": {"properties": {}, "required": ["a"]},
    "required of numbers": {"properties": {"a": {}}, "required": [1]},
    "a reference to itself": {"properties": {"a": {"$ref": "#"}}},
    "a reference to nothing": {"properties": {"a": {"$ref": "#/$defs/none"}}},
    "a reference to another place": {"properties": {"a": {"$ref": "https://a.b/c"}}},
    "an unsupported keyword": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "a bad pattern": {"properties": {"a": {"type": "string", "pattern": "("}}},
    "a contradiction": {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}},
                        "required": ["a"]},
    "an empty enum": {"properties": {"a": {"enum": []}}, "required": ["a"]},
    "odd enums": {"properties": {"a": {"enum": [None, 1.5, {"b": []}, "\u2042\n<"]}}},
    "odd names": {"properties": {"": {}, 'a"b': {}, "c\n>": {"type": "string"}, "\u2042": {}}},
    "a surrogate": {"properties": {"\ud800": {"type": "string"}}},
    "a deep one": nested(40),
    "a very deep one": nested(400),
    "a wide one": {"properties": {f"p{i}": {"type": "string"} for i in range(500)}},
    "const, anyOf, allOf": {"properties": {"a": {"const": 1}, "b": {"anyOf": [{}, 5]},
                                           "c": {"allOf": [{"type": "string"}]}}},
    "guidance's own words": {"x-guidance": {"whitespace_pattern": "("}, "properties": {"a": {}}},
}  # fmt: skip
NAMES = ['a"b', "a\nb", "</tool_call>", " ", "\0", "\u2042", "x" * 3000, "\ud800", '" | /.*/ #']
NAMES += ["", 5, None]


def called(arguments, **fields):
    call = {"id": "x", "type": "function", "function": {"name": "a", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [{**call, **fields}]}


SAID = {"role": "assistant", "content": "x"}
HISTORIES = {
    "a result without a call": {"role": "tool", "tool_call_id": "x", "content": "ok"},
    "a result without an id": {"role": "tool", "content": "ok"},
    "an id that is no string": {"role": "tool", "tool_call_id": [5], "content": "ok"},
    "arguments of a number": called(5, id=5),
    "deep arguments": called("[" * 50_000 + "]" * 50_000),
    "thoughts that are no text": {**SAID, "reasoning_content": 5},
    "thoughts in a list": {**SAID, "reasoning": [{"a": 1}]},
}
# Calls that this server may have sent.
MALFORMED_CALLS = {
    "arguments that are a list": called("[1]"),
    "arguments that are no JSON": called('{"x": '),
    "calls without content": {**called("{}"), "content": None},
}


@pytest.fixture(autouse=True, params=["hermes", "qwen3_coder", "kimi_k2"])
def chat_format(request, running):
    running.model.chat_format = FORMATS[request.param]


def check(http, asked, may_refuse=True):
    """asked: (what is odd, path, fields); eight at a time, so that they share steps."""

    def wrong(one):
        what, path, fields = one
        body = {"max_tokens": 3, "messages": [HI], **fields}
        # Not by httpx's own writer: a lone surrogate is no UTF-8.
        reply = http.post(path, content=json.dumps(body))
        refused = reply.status_code == 400 and "internal" not in reply.text
        fine = reply.status_code == 200 or (may_refuse and refused)
        return None if fine else (what, path, reply.status_code, reply.text[:500])

    with ThreadPoolExecutor(8) as pool:
        assert [found for found in pool.map(wrong, asked) if found] == []


def definitions():
    odd = {what: {"name": "a", "parameters": schema} for what, schema in SCHEMAS.items()}
    odd |= {repr(name): {"name": name, "parameters": {"properties": {"b": {}}}} for name in NAMES}
    for what, tool in odd.items():
        tools = [{"type": "function", "function": tool}]
        for choice in "auto", "required":
            yield what, CHAT, {"tools": tools, "tool_choice": choice}
        yield what, CHAT, {"tools": [{"type": "function", "function": {**tool, "strict": True}}]}
        ours = {"name": tool["name"], "input_schema": tool["parameters"]}
        yield what, "/v1/messages", {"tools": [ours], "tool_choice": {"type": "any"}}


@pytest.mark.long
def test_definitions(http):
    check(http, definitions())
    assert http.post(CHAT, json={"messages": [HI], "max_tokens": 1}).status_code == 200


def test_histories(http):
    for histories, may_refuse in (HISTORIES, True), (MALFORMED_CALLS, False):
        asked = [(what, CHAT, {"messages": [HI, m, HI]}) for what, m in histories.items()]
        check(http, asked, may_refuse)


def test_many_tools(http):
    tools = [{"name": f"t{i}", "input_schema": {"properties": {"a": {}}}} for i in range(300)]
    check(http, [("many", "/v1/messages", {"tools": tools, "tool_choice": {"type": "any"}})])
