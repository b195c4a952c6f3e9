"""Bad requests of every kind: a clear 4xx in the shape of the API, and a server that is well."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import pytest

from tests.support.raw_http import Answer, ask, connect, parsed, raw, read_all
from tests.support.server_kit import Running, serving
from vllm_metal_lite.server.anthropic_api.messages import MessagesRequest
from vllm_metal_lite.server.openai_api.chat import ChatCompletionRequest
from vllm_metal_lite.server.openai_api.completions import CompletionRequest
from vllm_metal_lite.server.openai_api.responses import ResponsesRequest
from vllm_metal_lite.server.openai_api.tokenize import DetokenizeRequest, TokenizeRequest
from vllm_metal_lite.server.settings import ServerConfig

HI = [{"role": "user", "content": "hi"}]
# path: (fields, a small good body)
ENDPOINTS = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": HI, "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"input": "x", "max_output_tokens": 2}),
    "/v1/messages": (MessagesRequest, {"messages": HI, "max_tokens": 2}),
    "/v1/messages/count_tokens": (MessagesRequest, {"messages": HI}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
# Absent, these would let an answer fill the context.
LENGTHS = {"max_tokens", "max_output_tokens", "max_completion_tokens"}
VALUES = [
    "true", "false", "0", "-1", "1", "3.5", "1e400", "NaN", "-Infinity", '"x"', '""', "[]", "{}",
    "[1]", "[-1]", "[1e300]", '["a"]', "[[1]]", "[[]]", '{"a": 1}',
    "1" + "0" * 30, "1" + "0" * 5000,
    '"\\ud800"', '"\\u0000"', "[null]", '{"type": "text"}', '{"1": 1}', '{"%s": 1}' % ("9" * 5000),
    "[" * 150 + "]" * 150, "[" * 100_000, '{"a":' * 5000, '{"self": 1, "messages": 2}',
    '{"role": "user"}', '[{"role": "user", "content": [{"type": "text"}]}]',
    '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
    '[{"role": "user", "content": "\\ud83d"}]', '[{"role": "nobody", "content": "x"}]',
    '[{"role": 5, "content": "x"}]', '[{"content": "x"}]', '[{"type": "what"}]',
    '[{"role": "assistant", "content": null, "tool_calls": [{"function": {"arguments": 5}}]}]',
    '[{"role": "tool", "content": {}, "tool_call_id": []}]', '"%s"' % ("x " * 20_000),
]  # fmt: skip
PER_FIELD = 8


def bodies() -> Iterator[tuple[str, bytes]]:
    """(path, body): each field of each endpoint with some of the values, from a fixed seed."""
    rng = random.Random(19)
    for path, (fields, good) in ENDPOINTS.items():
        for name in fields.model_fields:
            values = [*rng.sample(VALUES, PER_FIELD), *([] if name in LENGTHS else ["null"])]
            rest = json.dumps({k: v for k, v in good.items() if k != name})[1:-1]
            for value in values:
                parts = [f'"{name}": {value}', *([rest] if rest else [])]
                yield path, f"{{{', '.join(parts)}}}".encode()
        yield from ((path, body) for body in broken(json.dumps(good).encode()))


def broken(good: bytes) -> list[bytes]:
    """Bodies that are no objects, or no JSON, or not all there."""
    return [
        b"", b"null", b"[]", b"5", b'"x"', b"{}", b"{", good[:-1], good[: len(good) // 2],
        good + b"}", good + good, b"\xff\xfe" + good, good.replace(b"x", b"\xc3"), b"\x00",
        b"\x00" * 100, good.decode().encode("utf-16"), b"[" * 100_000, b'{"a":' * 50_000,
        good[:-1] + b', "stream": true, "stream": 5}', good[:-1] + b', "stream": tru}',
        b"a=1&b=2", b"<xml/>", b"\xef\xbb\xbf" + good, b" " * 100_000,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def running():
    with serving(config=ServerConfig(port=0, max_body_mib=1)) as running:
        yield running


def send(running: Running, path: str, body: bytes) -> Answer:
    return ask(running.url, path, "Content-Type: application/json", method="POST", body=body)


def is_well(running: Running) -> None:
    """Nothing runs, waits or is held, and a good request is served."""
    end = monotonic() + 30
    while monotonic() < end:
        status = ask(running.url, "/status").json()
        metrics = status["models"][0]["metrics"]
        held = metrics["requests_running"] + metrics["requests_waiting"] + metrics["blocks_owned"]
        if held + status["server"]["running"] + status["server"]["waiting"] == 0:
            break
        sleep(0.1)
    else:
        raise AssertionError(f"something is held: {status}")
    assert not running.server.generations
    good = json.dumps(ENDPOINTS["/v1/chat/completions"][1]).encode()
    assert send(running, "/v1/chat/completions", good).status == 200


def test_bad_bodies(running):
    """No 5xx, every error with a message, and in the shape of its API."""
    cases = list(bodies())
    assert len({body for _, body in cases}) > 1000
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda case: send(running, *case), cases))
    wrong = []
    for (path, body), answer in zip(cases, answers, strict=True):
        shown = (path, body[:120], answer.status, answer.body[:200])
        if answer.status == 200:
            continue
        try:
            error = answer.json()
            is_good = 400 <= answer.status < 500 and bool(error["error"]["message"])
            is_good &= (error.get("type") == "error") == path.startswith("/v1/messages")
        except (ValueError, KeyError, TypeError):
            is_good = False
        if not is_good:
            wrong.append(shown)
    assert not wrong, wrong[:5]
    statuses = [answer.status for answer in answers]
    assert statuses.count(400) > 500
    is_well(running)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("Content-Length: 50", b"{}"),  # and then nothing: the client goes
        ("Content-Length: -1", b"{}"),
        ("Content-Length: 99999999999999999999", b"{}"),
        ("Content-Length: x", b"{}"),
        ("Transfer-Encoding: chunked", b"zz\r\n{}\r\n0\r\n\r\n"),
        ("Transfer-Encoding: chunked", b"2\r\n{}"),
        ("Transfer-Encoding: chunked", b"10000000\r\n" + b"x" * 2**21),
    ],
)
def test_bodies_that_do_not_keep_their_word(running, header, body):
    host = running.url.removeprefix("http://")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n{header}\r\n\r\n"
    with connect(running.url) as sock:
        try:
            sock.sendall(head.encode() + body)
            sock.shutdown(1)
            data = read_all(sock)
        except OSError:  # the server need not listen to the end
            data = b""
    assert not data or 400 <= parsed(data).status < 500
    is_well(running)


def test_a_body_in_small_pieces(running):
    body = json.dumps(ENDPOINTS["/v1/completions"][1]).encode()
    host = running.url.removeprefix("http://")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with connect(running.url) as sock:
        for byte in head.encode() + body:
            sock.send(bytes([byte]))
        assert parsed(read_all(sock)).status == 200
    is_well(running)


@pytest.mark.parametrize(
    "request_line",
    [
        "GARBAGE",
        "POST /v1/chat/completions",
        "GET " + "/x" * 40_000 + " HTTP/1.1",
    ],
)
def test_what_is_no_http(running, request_line):
    data = raw(running.url, f"{request_line}\r\n\r\n".encode())
    assert not data or 400 <= parsed(data).status < 500
    is_well(running)
