"""HTTP by hand, for requests that no client sends."""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'


@dataclass
class Answer:
    """headers: by name in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def connect(url: str) -> socket.socket:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    return socket.create_connection((host, port), timeout=600)


def post_head(path: str, *headers: str) -> bytes:
    """The lines before the body of a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def raw(url: str, request: bytes) -> bytes:
    """All bytes that the server sends until it closes the connection."""
    with connect(url) as sock:
        # A server may close before it has read the whole request.
        with suppress(ConnectionError):
            sock.sendall(request)
        return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    """Bytes of the server until the connection is closed, or reset.

    A close with unread bytes of the request is a reset: it may overtake the answer.
    """
    pieces = []
    with suppress(ConnectionError):
        while piece := sock.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def ask(
    url: str,
    target: str,
    *headers: str,
    method: str = "GET",
    body: bytes = b"",
    host: str | None = None,
) -> Answer:
    """The answer to a request with these headers, Host and Connection: close, and no others.

    host: the value of the Host header; if empty, the request has none and is HTTP/1.0.
    """
    host = urlsplit(url).netloc if host is None else host
    lines = [f"{method} {target} HTTP/1.{1 if host else 0}", *headers, "Connection: close"]
    if host:
        lines.append(f"Host: {host}")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return parsed(raw(url, "\r\n".join([*lines, "", ""]).encode("utf-8") + body))


def parsed(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), {name.lower(): value for name, value in pairs}, body)
