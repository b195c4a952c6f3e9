"""Answers of a given form over HTTP, by each API's name for it."""

import json
import sys
from threading import Semaphore
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from tests.support.server.crowd import text_of
from vllm_metal_lite.errors import install
from vllm_metal_lite.structured_outputs import compiler

ASK = [{"role": "user", "content": "Tell me about a lantern in the rain."}]


class Lantern(BaseModel):
    colour: Literal["red", "green"]
    lit: bool


SCHEMA = {**Lantern.model_json_schema(), "additionalProperties": False}


def post(http, path, **fields):
    fields = {"max_tokens": 60, **fields}
    return http.post(f"/v1/{path}", json=fields)


def test_the_official_client_parses(client):
    asked = {"model": "demo", "messages": ASK, "response_format": Lantern}
    reply = client.chat.completions.parse(**asked, temperature=0)
    assert isinstance(reply.choices[0].message.parsed, Lantern)
    with client.chat.completions.stream(**asked, n=2) as stream:
        final = stream.get_final_completion()
    assert all(isinstance(choice.message.parsed, Lantern) for choice in final.choices)


def test_the_official_client_parses_responses(client):
    asked = {"model": "demo", "input": ASK, "text_format": Lantern}
    response = client.responses.parse(**asked, temperature=0)
    assert isinstance(response.output_parsed, Lantern)
    assert response.text.format.type == "json_schema"
    with client.responses.stream(**asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Lantern)


def test_the_anthropic_client_parses(running, http):
    with anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0) as client:
        asked = {"model": "demo", "messages": ASK, "max_tokens": 200}
        reply = client.messages.parse(**asked, output_format=Lantern)
        assert isinstance(reply.parsed_output, Lantern)
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in {"output_format": form}, {"output_config": {"format": form}}:
        reply = post(http, "messages", messages=ASK, **fields, max_tokens=200)
        Lantern.model_validate_json(reply.json()["content"][0]["text"])


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["yes", "no"]},
        {"regex": "yes|no"},
        {"grammar": 'root ::= "yes" | "no"'},
        {"json": {"enum": ["yes", "no"]}},
    ],
    ids=lambda form: next(iter(form)),
)
def test_vllms_field(http, path, form):
    asked = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}
    prompt = asked.get(path, {"messages": ASK})
    reply = post(http, path, **prompt, structured_outputs=form)
    text = text_of(f"/v1/{path}", reply.content)
    assert text.strip().strip('"') in ("yes", "no")


def test_any_object(http):
    how = {"temperature": 0, "max_tokens": 400, "response_format": {"type": "json_object"}}
    reply = post(http, "chat/completions", messages=ASK, **how).json()
    [choice] = reply["choices"]
    text = choice["message"]["content"]
    assert text.lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_an_object_with_a_schema(http):
    """As llama.cpp's server takes it."""
    form = {"type": "json_object", "schema": SCHEMA}
    reply = post(http, "chat/completions", messages=ASK, response_format=form).json()
    Lantern.model_validate_json(reply["choices"][0]["message"]["content"])
    form["schema"] = {"type": "object", "uniqueItems": True}
    error = post(http, "chat/completions", messages=ASK, response_format=form).json()["error"]
    assert error["param"] == "response_format.schema"


def test_a_form_that_only_the_engine_can_refuse(http):
    form = {"grammar": "start: <no>"}
    reply = post(http, "chat/completions", messages=ASK, structured_outputs=form)
    assert reply.status_code == 400
    assert "unknown special token" in reply.json()["error"]["message"]


def test_a_form_that_finds_the_compiler_busy_may_come_again(http, monkeypatch):
    monkeypatch.setattr(compiler, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(compiler, "_free_threads", Semaphore(0))
    reply = post(http, "chat/completions", messages=ASK, structured_outputs={"regex": "busy"})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == "server_busy"


def test_a_form_without_the_extra(http, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for name in "compiler", "grammar_text":
        module = f"vllm_metal_lite.structured_outputs.{name}"
        monkeypatch.delitem(sys.modules, module, raising=False)
    reply = post(http, "chat/completions", messages=ASK, structured_outputs={"regex": "a"})
    assert reply.status_code == 400
    assert install("structured") in reply.json()["error"]["message"]
