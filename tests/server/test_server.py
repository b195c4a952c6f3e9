"""What all endpoints share: admission, clients that go, the log."""

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from tests.support.server.command import eventually
from tests.support.server.raw_http import CHAT, connect
from vllm_metal_lite import EngineConfig
from vllm_metal_lite.server.openai_api import completions
from vllm_metal_lite.server.openai_api.chat import ChatCompletionRequest
from vllm_metal_lite.server.settings import ServerConfig
from vllm_metal_lite.server.worker.client import EngineClient
from vllm_metal_lite.structured_outputs import compiler

# Two seats, and two requests may wait.
SERVING = {
    "engine": EngineConfig(num_blocks=1024, max_num_seqs=2),
    "config": ServerConfig(port=0, max_waiting=2),
}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
LONG = {**HI, "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def client(running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
    eventually(lambda: not running.server.requests)


def begun(client: httpx.Client, **fields) -> ExitStack:
    """A stream that has been accepted; its client leaves when the stack is closed."""
    stack = ExitStack()
    body = {**LONG, "stream": True, **fields}
    answer = stack.enter_context(client.stream("POST", CHAT, json=body))
    assert answer.status_code == 200
    return stack


def test_too_many_requests_are_told_to_come_again(client):
    with ExitStack() as streams:
        for fields in {"n": 2}, {}, {}:  # every answer of a request counts
            streams.enter_context(begun(client, **fields))
        for path, kind in (CHAT, "server_error"), ("/v1/messages", "overloaded_error"):
            answer = client.post(path, json=HI)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert error["type"] == kind
            words = "the server is busy: 4 requests run or wait, and max_waiting is 2"
            assert error["message"] == words
        status = client.get("/status").json()["server"]
        assert status == {"running": 2, "waiting": 2, "max_waiting": 2}
    eventually(lambda: client.post(CHAT, json=HI).status_code == 200)


@pytest.mark.parametrize("where", ["the server", "the engine"])
def test_requests_whose_grammars_are_compiled_wait_like_others(running, client, monkeypatch, where):
    go, compiled = threading.Event(), EngineClient._accepted

    def check(form) -> None:
        go.wait(60)

    async def held(engine, request_id, method, *args):
        if method == "compile":
            await asyncio.to_thread(go.wait, 60)
        await compiled(engine, request_id, method, *args)

    if where == "the server":
        monkeypatch.setattr(compiler, "check", check)
    else:
        monkeypatch.setattr(EngineClient, "_accepted", held)
    asked = {**HI, "response_format": {"type": "json_object"}}
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(client.post, CHAT, json=asked) for _ in range(4)]
        eventually(lambda: client.get("/status").json()["server"]["waiting"] == 2)
        for body in asked, HI:
            answer = client.post(CHAT, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_busy")
        go.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 4
    assert client.get("/status").json()["server"]["running"] == 0


def test_requests_whose_token_ids_are_made_wait_like_others(running, client, monkeypatch):
    go, token_ids_of = threading.Event(), completions.token_ids_of

    def held(*args) -> list[list[int]]:
        go.wait(60)
        return token_ids_of(*args)

    monkeypatch.setattr(completions, "token_ids_of", held)
    body = {"prompt": "hi", "max_tokens": 2}
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(4)]
        try:
            eventually(lambda: client.get("/status").json()["server"]["waiting"] == 2)
            refused = client.post("/v1/completions", json=body)
            assert refused.json()["error"]["code"] == "server_busy"
        finally:
            go.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "two requests at once"])
def test_a_client_that_goes_frees_its_seat(running, client, stream, times):
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(running.url) as sock:
        sock.sendall((head.encode() + body) * times)
        eventually(lambda: client.get("/status").json()["server"]["running"] == 1)
    eventually(lambda: client.get("/status").json()["server"]["running"] == 0)
    engine = running.server.models.loaded["demo"]
    eventually(lambda: engine.metrics["requests_running"] == 0)


def test_unknown_fields_of_objects_have_their_place():
    body = ChatCompletionRequest.model_validate({**HI, **NESTED, "e": 1})
    objects = "response_format.b", "response_format.json_schema.c", "tools.function.d"
    assert [*body.unknown_fields()] == ["e", "stream_options.a", *objects]


_SCHEMA = {"schema": {"type": "null"}, "c": 1}
NESTED = {
    "stream": True,
    "stream_options": {"a": 1},
    "tool_choice": "none",
    "response_format": {"type": "json_schema", "b": 1, "json_schema": _SCHEMA},
    "tools": [{"type": "function", "function": {"name": "f", "d": 1}}],
}


def test_unknown_fields_are_logged_once_in_short_lines(client, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert client.post(CHAT, json={**HI, "surprise": [1]}).status_code == 200
        assert client.post(CHAT, json={**HI, "x" * 100_000: 1}).status_code == 200
        assert client.post("/tokenize", json={"prompt": "x", "surprise": 1}).status_code == 200
        for i in range(3):
            many = {f"{i} {k}" + "x" * 200: 1 for k in range(900)}
            assert client.post(CHAT, json={**HI, **many}).status_code == 200
    lines = [r.getMessage() for r in caplog.records if "are ignored" in r.getMessage()]
    known, _, other, *_, last = lines
    assert known == f"{CHAT}: fields of requests are ignored: 'surprise'"
    assert other == "/tokenize: fields of requests are ignored: 'surprise'"
    assert len(lines) == 5
    assert max(map(len, lines)) < 1200
    assert last.endswith(" and 87 more")


def test_each_request_may_be_logged(running, client, capfd):
    running.server.logs_requests = True
    reply = client.post(CHAT, json=HI).json()
    begun(client).close()
    eventually(lambda: not running.server.requests)
    whole, cut = capfd.readouterr().out.splitlines()
    usage, end = reply["usage"], reply["choices"][0]["finish_reason"]
    tokens = f"{usage['prompt_tokens']} prompt tokens (0 cached), {usage['completion_tokens']} new"
    times = r"in [\d.]+ s, first after [\d.]+ s"
    assert re.fullmatch(rf"{reply['id']}: {re.escape(tokens)} {times}, {end}", whole)
    assert reply["id"].startswith("chatcmpl-")
    assert cut.endswith(", cut short")
