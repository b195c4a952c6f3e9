"""Bad requests of many kinds: each gets an error in its API's shape, and the server lives on."""

import asyncio
import http.client
import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.support.server import raw_http
from tests.support.server.cli_kit import SAFETY
from tests.support.server.crowd import unclean, until
from vllm_metal_lite import EngineConfig
from vllm_metal_lite.server import anthropic_api, security
from vllm_metal_lite.server.openai_api import pooling
from vllm_metal_lite.server.openai_api.chat import ChatCompletionRequest
from vllm_metal_lite.server.openai_api.completions import CompletionRequest
from vllm_metal_lite.server.openai_api.responses import ResponsesRequest
from vllm_metal_lite.server.openai_api.tokenize import DetokenizeRequest, TokenizeRequest

# A short context: some of the requests do not say how many tokens they want.
SERVING = {"engine": EngineConfig(num_blocks=64, max_num_seqs=8, max_model_len=96)}

HI = [{"role": "user", "content": "hi"}]

# By path: the type of the body, and one that is served.
ENDPOINTS = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": HI, "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/embeddings": (pooling.EmbeddingRequest, {"input": "hi"}),
    "/v1/rerank": (pooling.RerankRequest, {"query": "hi", "documents": ["a"]}),
    "/v1/score": (pooling.ScoreRequest, {"text_1": "hi", "text_2": "a"}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    "/v1/messages": (anthropic_api.MessagesRequest, {"messages": HI, "max_tokens": 2}),
    "/v1/messages/count_tokens": (anthropic_api.CountTokensRequest, {"messages": HI}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}

# Values that some field of each kind does not want, as JSON.
VALUES = {
    "null": "null",
    "true": "true",
    "a negative number": "-1",
    "a fraction": "3.5",
    "a number beyond 64 bits": "1" + "0" * 30,
    "a number of 5,000 digits": "1" * 5000,
    "a number beyond floats": "1e400",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "an empty string": '""',
    "a string": '"x"',
    "a null byte": '"\\u0000"',
    "a lone surrogate": '"\\ud800"',
    "an empty list": "[]",
    "a list of null": "[null]",
    "a list of lists": "[[1]]",
    "an empty object": "{}",
    "an object": '{"type": "x", "1": 1, "self": 1}',
    "a key of 5,000 digits": '{"' + "9" * 5000 + '": 1}',
    "depth 150": "[" * 150 + "]" * 150,
    "depth 100,000": "[" * 100_000 + "]" * 100_000,
}

# Messages that no template or API takes; one item each.
ITEMS = {
    "no role": {"content": "x"},
    "role null": {"role": None, "content": "x"},
    "role of another type": {"role": 5, "content": "x"},
    "unknown role": {"role": "nobody", "content": "x"},
    "content of another type": {"role": "user", "content": 5},
    "content an object": {"role": "user", "content": {"text": "x"}},
    "content of nulls": {"role": "user", "content": [None]},
    "a part without a type": {"role": "user", "content": [{}]},
    "a part without text": {"role": "user", "content": [{"type": "text"}]},
    "a part with text null": {"role": "user", "content": [{"type": "text", "text": None}]},
    "an unknown part": {"role": "user", "content": [{"type": "x", "text": "x"}]},
    "an image": {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    "tool calls of another type": {"role": "assistant", "content": "", "tool_calls": 5},
    "a tool call that is null": {"role": "assistant", "content": "", "tool_calls": [None]},
    "a tool call without a name": {"role": "assistant", "tool_calls": [{"function": {}}]},
    "a tool result without a call": {"role": "tool", "content": [{"type": "tool_result"}]},
    "a surrogate": {"role": "user", "content": "\ud83d"},
    "null bytes": {"role": "user", "content": "\0" * 9},
    "deep content": {"role": "user", "content": [[[[["x"]]]]]},
    "a question that is too long": {"role": "user", "content": "a b c " * 500},
}

# Bodies that are never served, whatever the endpoint.
BODIES = {
    "nothing": b"",
    "white space": b"  \n",
    "no JSON": b"hello",
    "a form": b"model=x&prompt=y",
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-16": '{"model": "x"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"model": "x"}',
    "null bytes": b"\0" * 100,
    "null": b"null",
    "a number": b"5",
    "a string": b'"hi"',
    "an empty list": b"[]",
    "a list of bodies": b'[{"prompt": "hi"}]',
    "an empty object": b"{}",
    "truncated in a key": b'{"mod',
    "truncated in a string": b'{"model": "x',
    "truncated in an escape": b'{"model": "\\u00',
    "truncated in a number": b'{"n": -',
    "two bodies": b"{} {}",
    "trailing comma": b'{"n": 1,}',
    "single quotes": b"{'n': 1}",
    "a comment": b'{"n": 1 /* one */}',
    "a bad escape": b'{"model": "\\x41"}',
    "a control character": b'{"model": "a\nb"}',
    "depth 100,000 of lists": b"[" * 100_000,
    "depth 100,000 of objects": b'{"a":' * 100_000,
    "a closed depth of 100,000": b"[" * 100_000 + b"]" * 100_000,
    "a model of a million characters": b'{"model": "' + b"x" * 10**6 + b'"}',
    "100,000 unknown fields": b"{" + b",".join(b'"f%d":1' % i for i in range(100_000)) + b"}",
}


def with_field(base, name, value):
    """The base's JSON with one field more, or with another value of it."""
    rest = json.dumps({k: v for k, v in base.items() if k != name})[:-1]
    return f"{rest}{', ' if len(rest) > 1 else ''}{json.dumps(name)}: {value}}}".encode()


def requests(path):
    """(name, body, whether it must be refused) of all kinds for one endpoint."""
    kind, base = ENDPOINTS[path]
    for name, body in BODIES.items():
        yield name, body, True
    for name in kind.model_fields:
        for what, value in VALUES.items():
            yield f"{name}: {what}", with_field(base, name, value), what == "depth 100,000"
    listed = {"/v1/responses": "input", "/tokenize": "messages"}.get(path, "messages")
    if listed in kind.model_fields:
        for what, item in ITEMS.items():
            for stream in (b"", b', "stream": true'):
                body = {k: v for k, v in base.items() if k != "prompt"} | {listed: [item]}
                yield f"{what}, {stream!r}", json.dumps(body).encode()[:-1] + stream + b"}", False
    text = json.dumps(base).encode()
    yield "a field twice", text[:-1] + b"," + text[1:], False
    for cut in range(1, len(text)):
        yield f"truncated at {cut}", text[:cut], True


def connect(running):
    return http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=SAFETY)


def is_error(path, body):
    """Whether a body is an error in the shape of the path's API."""
    error = json.loads(body)
    if path.startswith("/v1/messages"):
        fields = {"type", "message"}
        right = error.keys() == {"type", "error"} and error["type"] == "error"
    else:
        fields, right = {"message", "type", "param", "code"}, error.keys() == {"error"}
    texts = error["error"]["message"], error["error"]["type"]
    right = right and error["error"].keys() == fields and "got b'" not in texts[0]
    return right and all(isinstance(t, str) and t for t in texts)


def assert_healthy(running):
    """Served as before, and nothing runs."""
    client = connect(running)
    client.request("POST", "/v1/chat/completions", json.dumps(ENDPOINTS["/v1/chat/completions"][1]))
    assert client.getresponse().read().count(b'"finish_reason"') == 1
    assert asyncio.run(until(lambda: unclean(running.url), SAFETY)) == ""
    assert not running.server.requests


@pytest.mark.long
@pytest.mark.parametrize("path", ENDPOINTS)
def test_bad_bodies(running, path, caplog):
    client, wrong = connect(running), []
    for name, body, must_be_refused in requests(path):
        client.request("POST", path, body, {"content-type": "application/json"})
        reply = client.getresponse()
        text = reply.read()
        fine = reply.status == 200 and not must_be_refused
        fine = fine or (reply.status in (400, 404, 413) and is_error(path, text))
        if not fine or b"internal error" in text:
            wrong.append((name, reply.status, text[:200]))
    assert wrong == []
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
    assert_healthy(running)


_HEAD = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"

# What comes behind the first lines of a request, and statuses that are right.  0: no reply.
BROKEN = {
    "no length": ("\r\n", {400}),
    "length of letters": ("Content-Length: ten\r\n\r\n{}", {400}),
    "length negative": ("Content-Length: -2\r\n\r\n{}", {400}),
    "length a fraction": ("Content-Length: 2.0\r\n\r\n{}", {400}),
    "length of 5,000 digits": ("Content-Length: " + "9" * 5000 + "\r\n\r\n{}", {400, 413}),
    "length of a terabyte": ("Content-Length: 1000000000000\r\n\r\n{}", {413}),
    "length too short": ('Content-Length: 5\r\n\r\n{"prompt": "hi"}', {400}),
    "length too long": ("Content-Length: 100\r\n\r\n{}", {0}),
    "two lengths": ("Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", {400}),
    "chunk of a bad size": ("Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n", {0, 400}),
    "chunks without an end": ("Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", {0}),
    "an empty chunk": ("Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    "unknown encoding": ("Transfer-Encoding: x\r\n\r\n{}", {400, 501}),
    "said to be gzip": ("Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x00ab", {400}),
    "a header without a name": (": x\r\nContent-Length: 2\r\n\r\n{}", {400}),
    "a header of 100,000": ("X: " + "x" * 100_000 + "\r\n\r\n", {0, 400, 431}),
    "10,000 headers": ("X: y\r\n" * 10_000 + "\r\n", {0, 400, 431}),
    "an end within the headers": ("X-Unfinished: ", {0}),
}


def send_raw(running, data, hangs_up):
    """The status of the reply to bytes; 0: none.  hangs_up: the client closes behind them."""
    with raw_http.connect(running.url) as client:
        try:
            client.sendall(data)
            if hangs_up:
                client.shutdown(socket.SHUT_WR)
            reply = b""
            while b"\r\n\r\n" not in reply and (more := client.recv(65536)):
                reply += more
        except ConnectionError:  # refused before all was sent
            return 0
    return int(reply.split(b" ", 2)[1]) if reply else 0


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http(running, name, caplog):
    rest, statuses = BROKEN[name]
    wrong = {}
    for path in ENDPOINTS:
        data = (_HEAD.format(path=path) + rest).encode("latin-1")
        if (status := send_raw(running, data, 0 in statuses)) not in statuses:
            wrong[path] = status
    assert wrong == {}
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_type_of_the_content_does_not_matter(running, path):
    """Clients forget it; a page of another origin is refused by its Origin header."""
    _, base = ENDPOINTS[path]
    client = connect(running)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "\xff"):
        client.request("POST", path, json.dumps(base), {"content-type": kind})
        reply = client.getresponse()
        assert reply.status == 200, kind
        reply.read()


def test_slow_bodies_hold_nobody_up(running, monkeypatch):
    """Each endpoint gets 8 bodies that never end: they are refused, others are served."""
    monkeypatch.setattr(security, "_BODY_SECONDS", 1.0)

    def trickle(path):
        begun = f"{_HEAD.format(path=path)}Content-Length: 500\r\n\r\n{{".encode()
        answer = raw_http.parsed(raw_http.raw(running.url, begun))  # until the server closes
        assert "too slow: 1 bytes in " in answer.json()["error"]["message"]
        return answer.status, is_error(path, answer.body)

    paths = [path for path in ENDPOINTS for _ in range(8)]
    with ThreadPoolExecutor(len(paths)) as pool:
        slow = [pool.submit(trickle, path) for path in paths]
        assert_healthy(running)
        assert [one.result() for one in slow] == [(408, True)] * len(paths)
    assert_healthy(running)


def test_a_body_in_small_pieces(running):
    body = json.dumps(ENDPOINTS["/v1/completions"][1])
    head = f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with raw_http.connect(running.url) as client:
        for byte in f"{_HEAD.format(path='/v1/completions')}{head}{body}".encode():
            client.send(bytes([byte]))
        assert raw_http.parsed(raw_http.read_all(client)).status == 200
