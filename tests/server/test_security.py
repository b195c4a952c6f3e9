"""Who may call the server, and how much they may send."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import Mock

import pytest

from tests.support.server.kit import Running, serving
from tests.support.server.raw_http import ask, connect, parsed, raw, read_all
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.server import connection, security
from vllm_metal_lite.server.lifecycle import listen, url_of
from vllm_metal_lite.server.settings import ServerConfig

KEY = "secret"
# The defaults, except for the size of a body.
SERVING = {"config": ServerConfig(port=0, max_body_mib=0.01)}
FRIEND = "https://friend.example"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """With a key, an origin and a name that are allowed."""
    config = ServerConfig(
        port=0, api_key=KEY, allowed_origins=(FRIEND,), allowed_hosts=("Box.Example",)
    )
    with serving(config=config) as server:
        yield server


def post_head(path: str, *headers: str) -> bytes:
    """The lines before the body of a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


# The Host header


ACCEPTED = (200, "")
FOREIGN = (403, "--allowed-host to accept the name")
NO_NAME = (400, "--allowed-host '*'")
HOSTS = {
    ACCEPTED: ["127.0.0.1", "localhost", "localhost.", "LOCALHOST:1234", "[::1]:80",
               "192.168.0.9:1", socket.gethostname()],
    FOREIGN: ["evil.example", "evil.example:8000", "localhost.evil.example",
              "127.0.0.1.nip.example"],
    NO_NAME: ["", "[", "user@localhost", "localhost:80:80", "localhost/a", ":80"],
}  # fmt: skip


@pytest.mark.parametrize(("host", "expected"), [(h, e) for e in HOSTS for h in HOSTS[e]])
def test_the_host_is_an_address_or_a_known_name(running, host, expected):
    """Addresses and the machine's own names are known."""
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


def test_another_origin_is_still_refused(guarded):
    answer = ask(guarded.url, "/health", "Origin: https://evil.example")
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


def test_a_client_that_goes_within_its_body_is_no_error(running, caplog):
    with connect(running.url) as sock:
        sock.sendall(post_head(CHAT, "Content-Length: 99") + b'{"mess')
        assert ask(running.url, "/health").status == 200  # the server waits for the rest
    for _ in range(3):
        assert ask(running.url, "/health").status == 200
    assert not caplog.records


# The shape of all answers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/completions", 405),
        ("PATCH", "/tokenize", 405),
        ("GET", MESSAGES, 405),
        ("POST", "/v1/messages/nothing", 404),
        ("POST", CHAT, 400),
        ("POST", MESSAGES, 400),
    ],
)
def test_errors_have_the_shape_of_their_api(running, method, path, status):
    answer = ask(running.url, path, method=method)
    assert answer.status == status
    assert answer.headers["x-request-id"].startswith("req_")
    whole = answer.json()
    if path.startswith(MESSAGES):
        assert whole["type"] == "error"
        assert set(whole["error"]) == {"type", "message"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    else:
        assert set(whole) == {"error"}
        assert set(whole["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert answer.headers["allow"]


def test_an_unknown_failure_has_the_shape_of_its_api(running, monkeypatch, caplog):
    broken = Mock(side_effect=ZeroDivisionError("the secret reason"))
    monkeypatch.setattr(security._Checked, "_check", broken)
    for path in CHAT, MESSAGES:
        answer = ask(running.url, path, method="POST", body=BODY)
        assert answer.status == 500
        assert answer.json()["error"]["message"] == "internal error: see the server's log"
        assert answer.headers["x-request-id"]
    assert len([r for r in caplog.records if r.exc_info]) == 2
    monkeypatch.undo()
    assert ask(running.url, "/health").status == 200


def test_every_answer_has_an_id_of_its_own(running):
    ids = set()
    for method, path, body in (
        ("HEAD", "/", b""),
        ("GET", "/health", b""),
        ("POST", CHAT, BODY),
        ("POST", CHAT, BODY[:-1] + b', "stream": true}'),
        ("POST", MESSAGES, BODY),
    ):
        answer = ask(running.url, path, method=method, body=body)
        assert answer.status == 200
        ids.add(answer.headers["x-request-id"])
    assert len(ids) == 5


# Other ways of HTTP


def test_head_has_no_body(running):
    answer = ask(running.url, "/", method="HEAD")
    assert answer.status == 200
    assert answer.body == b""
    assert int(answer.headers["content-length"]) > 0


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
        with suppress(OSError):  # it has closed already
            sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    if answer:
        assert parsed(answer).status in (400, 431)
        assert "not an HTTP/1.1 request" in parsed(answer).json()["error"]["message"]
    assert ask(running.url, "/health").status == 200
    assert capfd.readouterr().err == ""


def test_small_events_are_not_held_back():
    """Nagle's algorithm would keep a token until the client has confirmed the one before."""

    async def no_delay() -> int:
        accepted = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(
            lambda _, writer: accepted.set_result(writer), sock=listen(ServerConfig(port=0))
        )
        async with server:
            with socket.create_connection(server.sockets[0].getsockname()):
                writer = await accepted
                taken = writer.get_extra_info("socket")
                value = taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                writer.close()
                return value

    assert asyncio.run(no_delay())


# Options


@pytest.mark.parametrize(
    ("field", "flag", "value", "words"),
    [
        ("host", "--host", "0.0.0.0", "can be reached from other machines: set an api_key"),
        ("host", "--host", "::", "can be reached"),
        ("host", "--host", "", "can be reached"),
        ("host", "--host", "box.example", "can be reached"),
        ("api_key", "--api-key", "", "must be ASCII"),
        ("api_key", "--api-key", " x", "must be ASCII"),
        ("api_key", "--api-key", "two words", "must be ASCII"),
        ("api_key", "--api-key", "schlüssel", "must be ASCII"),
        ("allowed_origins", "--allowed-origin", "friend.example", "as browsers send them"),
        ("allowed_origins", "--allowed-origin", f"{FRIEND}/", f"got '{FRIEND}/'"),
        ("allowed_hosts", "--allowed-host", "https://box.example", "got 'https://box.example'"),
        ("allowed_hosts", "--allowed-host", "box.example:80", "must be names without a port"),
        ("port", "--port", 65536, "must be an integer from 0 to 65535, got 65536"),
        ("port", "--port", "http", "must be an integer from 0 to 65535, got 'http'"),
        ("drain", "--drain", float("inf"), "must be"),
        ("drain", "--drain", -1, "must be"),
        ("keep_alive", "--keep-alive", 0, "must be"),
        ("max_body_mib", "--max-body-mib", 0, "must be"),
        ("max_waiting", "--max-waiting", -1, "must be"),
        ("memory_budget_gib", "--memory-budget-gib", 0, "must be"),
    ],
)
def test_an_option_is_refused_in_python_as_on_the_command_line(field, flag, value, words, capsys):
    with pytest.raises(ConfigError) as failure:
        ServerConfig(**{field: (value,) if field.startswith("allowed") else value})
    message = str(failure.value)
    assert message.startswith(f"{field} ")
    assert words in message
    assert main(["serve", f"{flag}={value}"]) == 2
    named = message.replace(field, flag).replace("api_key", "--api-key")
    assert capsys.readouterr().err == f"error: {named}\n"


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
        bound = listen(ServerConfig(host=host, port=0, api_key=KEY))
    except ConfigError:
        assert ":" in host  # a machine without IPv6
        return
    with bound:
        assert url_of(bound).startswith(url)
        with connect(url_of(bound)):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_loopback_needs_no_key(host):
    assert ServerConfig(host=host).api_key is None
