"""How the server listens, and what it makes of odd and slow clients."""

import asyncio
import socket
from contextlib import suppress

import pytest

from tests.support.server.raw_http import BODY, CHAT, ask, connect, parsed, post_head, raw, read_all
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.server import connection, security
from vllm_metal_lite.server.lifecycle import listen, url_of
from vllm_metal_lite.server.settings import ServerConfig


def test_a_body_that_drips_is_given_up(running, monkeypatch):
    monkeypatch.setattr(security, "_BODY_SECONDS", 0.5)
    with connect(running.url) as sock:
        sock.sendall(post_head(CHAT, "Content-Length: 9999"))
        assert parsed(drip(sock)).status == 408


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_head_that_drips_or_stays_away_is_given_up(running, monkeypatch, before, head):
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.5)
    with connect(running.url) as sock:
        sock.sendall(before + head)
        answer = drip(sock) if head else read_all(sock)
    assert answer.count(b"HTTP/1.1 200") == bool(before)


def drip(sock: socket.socket) -> bytes:
    """What a server sends until it closes on a client that sends a byte at a time."""
    received = b""
    while True:
        try:
            sock.sendall(b"x")
            sock.settimeout(0.02)
            piece = sock.recv(65536)
        except TimeoutError:
            continue
        except ConnectionError:
            return received
        if not piece:
            return received
        received += piece


def test_a_client_that_breaks_its_body_off_is_no_error(running, caplog):
    with connect(running.url) as sock:
        sock.sendall(post_head("/nowhere", "Transfer-Encoding: chunked"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 404")
        sock.sendall(b"zzzz\r\n")  # after the answer
        read_all(sock)
    with connect(running.url) as sock:
        sock.sendall(post_head(CHAT, "Content-Length: 99") + b'{"mess')
        assert ask(running.url, "/health").status == 200  # the server waits for the rest
    for _ in range(3):
        assert ask(running.url, "/health").status == 200
    assert not caplog.records


def test_a_bad_chunk_right_behind_the_head_is_one_answer_and_no_traceback(running, caplog):
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(running.url, head + b"ZZ\r\n")
    assert answer.count(b"HTTP/1.1 4") == 1
    assert "illegal chunk header" in parsed(answer).json()["error"]["message"]
    assert ask(running.url, "/health").status == 200
    assert not caplog.records


@pytest.mark.parametrize("stream", [b"", b', "stream": true'])
def test_a_client_that_only_stops_sending_gets_its_answer(running, stream):
    body = BODY[:-1] + stream + b"}"
    with connect(running.url) as sock:
        sock.sendall(post_head(CHAT, f"Content-Length: {len(body)}") + body)
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    assert parsed(answer).status == 200
    assert b'"finish_reason":"' in answer


@pytest.mark.parametrize("host", ["localhost", "[::1]:80", "evil.example"])
def test_a_whole_uri_as_the_target(running, host):
    status = 403 if "evil" in host else 200
    assert ask(running.url, f"http://{host}/v1/models").status == status
    assert ask(running.url, f"http://{host}", host="localhost").status == status


def test_head_has_no_body(running):
    answer = ask(running.url, "/", method="HEAD")
    assert answer.status == 200
    assert answer.body == b""
    assert int(answer.headers["content-length"]) > 0
    assert ask(running.url, "/events", method="HEAD").body == b""


def test_http_1_0_gets_whole_answers_and_streams(running):
    head = f"POST {CHAT} HTTP/1.0\r\nHost: localhost\r\nContent-Length: "
    streamed = BODY[:-1] + b', "stream": true}'
    whole, stream = (
        parsed(raw(running.url, f"{head}{len(body)}\r\n\r\n".encode() + body))
        for body in (BODY, streamed)
    )
    assert whole.json()["choices"]
    assert "transfer-encoding" not in stream.headers
    assert stream.body.endswith(b"data: [DONE]\n\n")


def test_requests_that_come_at_once_are_answered_in_turn(running):
    chat = post_head(CHAT, f"Content-Length: {len(BODY)}") + BODY
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    data = raw(running.url, chat + chat + last)
    assert data.count(b"HTTP/1.1 200") == 3
    assert data.count(b'"finish_reason":"length"') == 2
    assert data.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(
    "junk",
    [
        b"\0\1\2\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 99_999,
        b"\r\n",
        b"GARBAGE\r\n\r\n",
        b"POST /v1/chat/completions\r\n\r\n",
    ],
)
def test_what_is_not_http_harms_nobody(running, junk, capfd):
    answer = b""
    # A server that closes with bytes unread resets the connection: sending or reading may fail.
    with connect(running.url) as sock, suppress(ConnectionError):
        sock.sendall(junk)
        with suppress(OSError):  # the server has closed already
            sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    if answer:
        assert parsed(answer).status in (400, 431)
        assert "not an HTTP/1.1 request" in parsed(answer).json()["error"]["message"]
    assert ask(running.url, "/health").status == 200
    assert capfd.readouterr().err == ""


async def test_small_events_are_not_held_back():
    """Nagle's algorithm would keep a token until the client has confirmed the one before."""
    accepted = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda _, writer: accepted.set_result(writer), sock=listen(ServerConfig(port=0))
    )
    async with server:
        with socket.create_connection(server.sockets[0].getsockname()):
            writer = await accepted
            taken = writer.get_extra_info("socket")
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://127.0.0.1:"),
        ("0.0.0.0", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
        ("::", "http://[::1]:"),
    ],
)
def test_the_url_is_one_that_this_machine_reaches(host, url):
    try:
        bound = listen(ServerConfig(host=host, port=0, api_key="secret"))
    except ConfigError:
        assert ":" in host  # a machine without IPv6
        return
    with bound:
        assert url_of(bound).startswith(url)
        with connect(url_of(bound)):
            pass
