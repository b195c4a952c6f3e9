"""Who may call the server, and how much they may send."""

import socket
from collections.abc import Iterator

import pytest

from tests.support.server.kit import Running, serving
from tests.support.server.raw_http import BODY, CHAT, MESSAGES, ask, connect, parsed, post_head, raw
from vllm_metal_lite.server.settings import ServerConfig

KEY = "secret"
# The defaults, except for the size of a body.
SERVING = {"config": ServerConfig(port=0, max_body_mib=0.01)}
FRIEND = "https://friend.example"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """With a key, an origin and a name that are allowed."""
    config = ServerConfig(
        port=0, api_key=KEY, allowed_origins=(FRIEND,), allowed_hosts=("Box.Example",)
    )
    with serving(config=config) as server:
        yield server


# The Host header


ACCEPTED = (200, "")
FOREIGN = (403, "--allowed-host to accept the name")
NO_NAME = (400, "--allowed-host '*'")
_OWN = "127.0.0.1 localhost localhost. LOCALHOST:1234 [::1]:80 192.168.0.9:1"
_OTHERS = "evil.example evil.example:8000 localhost.evil.example 127.0.0.1.nip.example"
HOSTS = {
    ACCEPTED: [*_OWN.split(), socket.gethostname()],
    FOREIGN: _OTHERS.split(),
    NO_NAME: ["", "[", "user@localhost", "localhost:80:80", "localhost/a", ":80"],
}


@pytest.mark.parametrize(("host", "expected"), [(h, e) for e in HOSTS for h in HOSTS[e]])
def test_the_host_is_an_address_or_a_known_name(running, host, expected):
    answer, (status, words) = ask(running.url, "/health", host=host), expected
    assert answer.status == status
    if words:
        assert words in answer.json()["error"]["message"]
        kind = "permission_error" if status == 403 else "invalid_request_error"
        assert answer.json()["error"]["type"] == kind


def test_an_empty_host_is_refused(running):
    answer = raw(running.url, b"GET /health HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n")
    assert parsed(answer).status == 400


def test_a_name_may_be_allowed(guarded):
    assert ask(guarded.url, "/health", host="box.example:80").status == 200
    assert ask(guarded.url, "/health", host="evil.example").status == 403


# The Origin header, and CORS


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost", "http://[", "a", ""],
)
def test_pages_of_other_origins_are_refused(running, origin):
    headers = f"Origin: {origin}", "Content-Type: text/plain"
    answer = ask(running.url, CHAT, *headers, method="POST", body=BODY)
    assert answer.status == 403
    assert "--allowed-origin" in answer.json()["error"]["message"]
    assert ask(running.url, "/health", f"Origin: {origin}").status == 403
    two = f"Origin: {running.url}", f"Origin: {origin}"
    assert ask(running.url, "/health", *two).status == 403
    assert ask(running.url, "/health", *reversed(two)).status == 403


@pytest.mark.parametrize(
    ("site", "destination", "path", "status"),
    [
        ("cross-site", "image", "/v1/models", 403),
        ("cross-site", "iframe", "/", 403),
        ("cross-site", "document", "/metrics", 403),
        ("cross-site", "document", "/", 200),  # a link to the page
        ("same-origin", "empty", "/v1/models", 200),
        ("none", "document", "/v1/models", 200),  # typed by the user
    ],
)
def test_another_site_gets_nothing_without_an_origin(running, site, destination, path, status):
    headers = f"Sec-Fetch-Site: {site}", f"Sec-Fetch-Dest: {destination}"
    assert ask(running.url, path, *headers).status == status


def test_the_own_page_is_served_and_no_cors_header_is_sent(running):
    answer = ask(running.url, "/health", f"Origin: {running.url}")
    assert answer.status == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = "Origin: https://evil.example", "Access-Control-Request-Method: POST"
    assert ask(running.url, CHAT, *preflight, method="OPTIONS").status == 403


def test_an_allowed_origin_may_ask_first_and_then_read(guarded):
    preflight = (
        f"Origin: {FRIEND}",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization,content-type",
        "Access-Control-Request-Private-Network: true",
    )
    answer = ask(guarded.url, CHAT, *preflight, method="OPTIONS")
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == FRIEND
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["x-request-id"]
    for key, status in (KEY, 200), ("wrong", 401):  # a page may also read why it was refused
        answer = ask(guarded.url, "/v1/models", f"Origin: {FRIEND}", f"x-api-key: {key}")
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == FRIEND
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    answer = ask(guarded.url, "/health", "Origin: https://evil.example")  # another is refused
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.long
def test_any_name_and_any_origin_may_be_allowed():
    config = ServerConfig(port=0, allowed_hosts=("*",))
    with serving(config=config) as running:
        for host in "evil.example", "":  # "": HTTP/1.0
            assert ask(running.url, "/health", host=host).status == 200
    with serving(config=ServerConfig(port=0, allowed_origins=("*",))) as running:
        for origin in "https://any.example", "null":
            answer = ask(running.url, "/v1/models", f"Origin: {origin}")
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert ask(running.url, "/health", host="evil.example").status == 403


# The key


@pytest.mark.parametrize(
    "headers",
    [
        ["Authorization: Bearer secret"],
        ["authorization: bearer  secret "],
        ["X-API-Key: secret"],
        ["Authorization: Bearer something-else", f"x-api-key: {KEY}"],
    ],
)
def test_the_key_may_come_in_either_header(guarded, headers):
    assert ask(guarded.url, "/v1/models", *headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        ["Authorization: Bearer"],
        ["Authorization: Bearer wrong"],
        ["Authorization: Basic secret"],
        ["Authorization: secret"],
        ["x-api-key: secre"],
        ["x-api-key: sécret"],
        ["x-api-key:"],
    ],
)
def test_a_wrong_key_is_refused(guarded, headers):
    answer = ask(guarded.url, "/v1/models", *headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.body.decode()
    answer = ask(guarded.url, MESSAGES, *headers, method="POST", body=BODY)
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.json()["type"] == "error"


OPEN = {"/": 200, "/health": 200, "/page/base.css": 200, "/page/none": 404}
CLOSED = ["/v1/models", "/status", "/metrics", "/events", "/tokenize", "//", "/nothing", "/health/"]


@pytest.mark.parametrize("path", [*OPEN, *CLOSED])
def test_all_but_the_page_and_its_files_needs_the_key(guarded, path):
    assert ask(guarded.url, path).status == OPEN.get(path, 401)


def test_no_path_below_the_page_leads_out_of_its_folder(guarded):
    outside = ["../v1/models", "%2e%2e/page.py", "..%2fpage.py", "/etc/passwd"]
    for path in *outside, "nothing.js", "vendor", "":
        answer = ask(guarded.url, f"/page/{path}")
        assert answer.status == 404
        assert answer.json()["error"]["type"] == "not_found_error"


# Bodies


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(running, path, chunked):
    body = b'{"messages": "' + b"x" * 20_000 + b'"}'
    if chunked:
        pieces = (body[i : i + 4000] for i in range(0, len(body), 4000))
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        head = post_head(path, "Connection: close", "Transfer-Encoding: chunked")
        answer = parsed(raw(running.url, head + chunks + b"0\r\n\r\n"))
    else:
        answer = ask(running.url, path, method="POST", body=body)
    assert answer.status == 413
    error = answer.json()["error"]
    assert error["message"] == "the request is larger than --max-body-mib (0.01 MiB)"
    expected = "request_too_large" if path == MESSAGES else "invalid_request_error"
    assert error["type"] == expected


def test_a_body_that_is_announced_as_large_is_not_read(running):
    with connect(running.url) as sock:
        headers = "Connection: close", "Expect: 100-continue", "Content-Length: 99999999999"
        sock.sendall(post_head(CHAT, *headers))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_length_beside_chunks_is_refused_and_the_connection_closed(running):
    head = post_head(CHAT, "Content-Length: 3", "Transfer-Encoding: chunked")
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    data = raw(running.url, head + b"0\r\n\r\n" + smuggled)
    assert data.count(b"HTTP/1.1 ") == 1
    assert parsed(data).status == 400
    assert "not both" in parsed(data).json()["error"]["message"]


def test_many_headers_are_refused(running):
    answer = ask(running.url, "/health", *("a: b" for _ in range(1000)))
    assert answer.status == 431
    assert answer.json()["error"]["message"] == "the request has 1002 headers, more than 128"
