"""Pictures by URL: fetched from allowed hosts at public addresses, within limits."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from tests.support.images.drawn import DIGIT, READER, SEVEN, chat_part, response_part, text
from tests.support.server.kit import user
from vllm_metal_lite.images.pictures import bytes_of
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.media import MAX_REDIRECTS, Media, is_public
from vllm_metal_lite.server.served_model import ModelSpec
from vllm_metal_lite.server.settings import ServerConfig

SERVING = {
    "specs": [ModelSpec("reader", str(READER))],
    "config": ServerConfig(port=0, allowed_media_domains=("127.0.0.1",)),
}
PNG = bytes_of(SEVEN)


class Files(BaseHTTPRequestHandler):
    """hosts: the Host header of each request.  Redirects: /to/URL and /hops/N."""

    hosts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.hosts.append(self.headers["Host"])
        first, _, rest = self.path[1:].partition("/")
        if first == "slow":
            self.server.waiting.wait(60)
        if first in ("to", "hops"):
            self.send_response(302)
            hops = f"/hops/{int(rest) - 1}" if rest.isdecimal() else rest
            self.send_header("Location", "/seven.png" if rest == "1" else hops)
            self.end_headers()
            return
        self.send_response(404 if first == "missing" else 200)
        self.end_headers()
        self.wfile.write(b"<html>" if first == "page" else PNG)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The URL of a server of pictures on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        server.daemon_threads, server.waiting = True, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.waiting.set()
        server.shutdown()


OPEN = Media(["127.0.0.1"], allows=lambda address: address == "127.0.0.1")


def fetch(media: Media, *urls: str) -> list[bytes]:
    found = asyncio.run(media.fetch({url: f"at.{i}" for i, url in enumerate(urls)}))
    return [found[url] for url in urls]


def refusal(media: Media, url: str) -> str:
    with pytest.raises(ApiError) as error:
        fetch(media, url)
    assert error.value.status == 400
    assert error.value.message.startswith("at.0: ")
    assert len(error.value.message) < 300
    return error.value.message


def test_a_file_is_fetched_and_redirects_are_followed(site):
    urls = f"{site}/seven.png", f"{site}/hops/{MAX_REDIRECTS}"
    assert fetch(OPEN, *urls) == [PNG, PNG]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"hops/{MAX_REDIRECTS + 1}", f"more than {MAX_REDIRECTS} redirects"),
        ("missing", "the status is 404"),
        ("to/file:///etc/hosts", "'file' is not http or https"),
        ("to/http://127.0.0.2/", "the host '127.0.0.2' is not in allowed_media_domains"),
        ("to/http://[::1", "cannot be fetched"),
    ],
)
def test_what_cannot_be_fetched_is_said(site, path, words):
    assert words in refusal(OPEN, f"{site}/{path}")


def test_a_redirect_to_a_private_address_is_refused(site):
    anywhere = replace(OPEN, domains=["*"])
    assert fetch(anywhere, f"{site}/seven.png") == [PNG]
    for private in ("127.0.0.2", "[::1]", "169.254.169.254", "2130706434", "0x7f.2"):
        words = refusal(anywhere, f"{site}/to/http://{private}:1/")
        assert "has an address that is not public" in words


def test_limits_of_bytes_and_time(site):
    small = replace(OPEN, max_bytes=len(PNG) + 1)
    assert fetch(small, f"{site}/a.png") == [PNG]
    with pytest.raises(ApiError, match=f"may have {len(PNG) + 1:,} bytes together"):
        fetch(small, f"{site}/a.png", f"{site}/b.png")
    why = refusal(replace(OPEN, seconds=0.2), f"{site}/slow")
    assert why.endswith("cannot be fetched: it has not come within 0.2 seconds")


def test_a_name_is_resolved_once_and_checked(site, monkeypatch):
    """A name server would answer a second time with another address; the server asks only once."""
    port, answers = int(site.rpartition(":")[2]), ["127.0.0.1", "127.0.0.2"]
    real = socket.getaddrinfo

    def resolve(host, port, *args, **kwargs):
        if host == b"pictures.test" or host == "pictures.test":
            host = answers.pop(0)
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url, media = f"http://Pictures.test:{port}/a.png", replace(OPEN, domains=["pictures.test"])
    assert fetch(media, url) == [PNG]
    assert answers == ["127.0.0.2"]
    assert Files.hosts[-1] == f"pictures.test:{port}"
    assert "not public" in refusal(media, url)


PUBLIC = ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::")
PRIVATE = (
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
    *("::", "::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff0e::1", "2001:db8::1", "::7f00:1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1::1"),
)


@pytest.mark.parametrize("address", [*PUBLIC, *PRIVATE])
def test_public_addresses(address):
    assert is_public(address) == (address in PUBLIC)


# Through the server


def bodies(url: str) -> list[tuple[str, str, dict]]:
    """(path, place of the picture, body) in each API."""
    block = {"type": "image", "source": {"type": "url", "url": url}}
    asked = user([block, text(DIGIT)])
    parts = [response_part(url), text(DIGIT, "input_text")]
    chat = {"messages": [user([chat_part(url), text(DIGIT)])], "temperature": 0}
    return [
        ("chat/completions", "messages.0.content.0", chat),
        ("responses", "input.0.content.0", {"input": [user(parts)], "temperature": 0}),
        ("messages", "messages.0.content.0", {"messages": [asked], "max_tokens": 20}),
    ]


def test_a_request_cannot_reach_loopback(http, site):
    for path, place, body in bodies(f"{site}/seven.png"):
        reply = http.post(f"/v1/{path}", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == (
            f"{place}: '{site}/seven.png' cannot be fetched: the host '127.0.0.1' has an address "
            "that is not public"
        )
    count = len(Files.hosts)
    other = http.post("/v1/chat/completions", json=bodies("https://example.org/a.png")[0][2])
    assert "'example.org' is not in allowed_media_domains" in other.json()["error"]["message"]
    assert len(Files.hosts) == count


def test_pictures_by_url_are_read_in_each_api(http, running, site, monkeypatch):
    monkeypatch.setattr(running.server, "media", replace(running.server.media, allows=OPEN.allows))
    for path, _, body in bodies(f"{site}/seven.png"):
        reply = http.post(f"/v1/{path}", json=body)
        assert reply.status_code == 200, reply.text
        assert "It is a 7." in reply.text
    _, _, body = bodies(f"{site}/seven.png")[0]
    body["messages"].insert(0, user([chat_part(f"{site}/seven.png"), chat_part(SEVEN)]))
    count = len(Files.hosts)
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] > 3 * 16
    assert len(Files.hosts) == count + 1  # one URL is fetched once
    for path, place, body in bodies(f"{site}/page"):
        reply = http.post(f"/v1/{path}", json=body)
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert message.startswith(f"{place}: the picture of 6 bytes cannot be decoded")
