"""The command `serve` and signals: answers end properly, and no process is left."""

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import httpx
import pytest

from tests.support.run_python import run_python
from tests.support.server.cli_kit import SAFETY
from tests.support.server.command import Command, eventually, serve_command, wait_until_draining

pytestmark = pytest.mark.long

HI = {"messages": [{"role": "user", "content": "hi"}]}
SHORT = {**HI, "max_tokens": 400, "ignore_eos": True}
LONG = {**HI, "max_tokens": 4000, "ignore_eos": True}
# Requests of each API whose answers are long.
LONG_BY_PATH = {
    "/v1/chat/completions": LONG,
    "/v1/responses": {"input": "hi", "max_output_tokens": 4000, "ignore_eos": True},
    "/v1/messages": LONG,
}
SHUTTING_DOWN = "the server is shutting down"


@contextmanager
def streamed(client: httpx.Client, path: str, body: dict) -> Iterator[Iterator[str]]:
    """The data of a stream's events; some tokens have been generated."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        data = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        while not _has_text(next(data)):
            pass
        yield data


def error_at_the_end(path: str, data: Iterator[str]) -> dict:
    """The error that ends a stream, in the form of its API."""
    events = list(data)
    if path.endswith("completions"):
        assert events.pop() == "[DONE]"
    last = json.loads(events[-1])
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        last = last["response"]
    return last["error"]


def _has_text(event: str) -> bool:
    return '"text":"' in event or ("delta" in event and '"content":""' not in event)


@contextmanager
def up(tmp_path, *args: str) -> Iterator[tuple[Command, httpx.Client]]:
    with (
        serve_command(tmp_path / "err", *args) as command,
        httpx.Client(base_url=command.url(), timeout=SAFETY) as client,
    ):
        yield command, client


def status(client: httpx.Client) -> dict:
    """Of the first model."""
    return client.get("/status").json()["models"][0]


def engine_of(client: httpx.Client) -> int:
    return status(client)["pid"]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """An engine that makes no tokens, so no answer ends, however slow the machine is."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # the server has ended it
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("number", "group", "code"),
    [
        pytest.param(signal.SIGTERM, False, 0, id="SIGTERM", marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, True, 0, id="SIGTERM to all"),
        pytest.param(signal.SIGINT, True, 130, id="Ctrl-C", marks=pytest.mark.thorough),
    ],
)
def test_the_answers_under_way_are_finished(tmp_path, number, group, code):
    with up(tmp_path, "--drain", str(SAFETY)) as (command, client), ExitStack() as streams:
        engine = engine_of(client)
        data = streams.enter_context(streamed(client, "/v1/chat/completions", SHORT))
        with stopped(engine):
            command.signal(number, group)
            wait_until_draining(client)
            for path in "/v1/chat/completions", "/v1/messages", "/tokenize":
                refused = client.post(path, json=SHORT)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) > 0
                assert refused.json()["error"]["message"] == SHUTTING_DOWN
                assert refused.json()["error"].get("code") in ("server_shutting_down", None)
        *_, last, done = data
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert command.leave() == code
        assert "Traceback" not in command.err.read_text()


def num_in_engine(client):
    """Without those whose prompts the server still makes."""
    return client.get("/status").json()["models"][0]["metrics"]["requests_running"]


@pytest.mark.parametrize("how", ["drain", "second signal"])
def test_answers_that_take_too_long_end_with_an_error(tmp_path, how):
    drain = "0.2" if how == "drain" else str(SAFETY)
    with up(tmp_path, "--drain", drain) as (command, client), ExitStack() as streams:
        engine = engine_of(client)
        data = {
            path: streams.enter_context(streamed(client, path, body))
            for path, body in LONG_BY_PATH.items()
        }
        with ThreadPoolExecutor() as threads, ExitStack() as until_told:
            whole = threads.submit(client.post, "/v1/chat/completions", json=LONG)
            eventually(lambda: num_in_engine(client) == 4)
            until_told.enter_context(stopped(engine))
            command.signal(signal.SIGTERM)
            if how == "second signal":
                wait_until_draining(client)
                command.signal(signal.SIGTERM)
            errors = {path: error_at_the_end(path, events) for path, events in data.items()}
            assert {error["message"] for error in errors.values()} == {SHUTTING_DOWN}
            assert errors["/v1/chat/completions"]["code"] == "server_shutting_down"
            assert whole.result().status_code == 503
            assert whole.result().headers["retry-after"]
        assert command.leave() == 0
        err = command.err.read_text()
        assert f"Stopping: 4 requests may take {drain} s; a second Ctrl-C ends them now\n" in err
        assert "Traceback" not in err


def test_a_request_that_the_engine_has_not_seen_is_told_in_the_form_of_its_api(tmp_path):
    with up(tmp_path, "--drain", "0.2") as (command, client), ThreadPoolExecutor() as threads:
        half = http.client.HTTPConnection(client.base_url.host, client.base_url.port, SAFETY)
        with stopped(engine_of(client)), closing(half):
            paths = ["/v1/chat/completions", "/v1/messages"]
            waits = [threads.submit(client.post, path, json=SHORT) for path in paths]
            half.putrequest("POST", paths[0])
            half.putheader("Content-Length", "100")
            half.endheaders(b"{")
            eventually(lambda: client.get("/status").json()["server"]["running"] == len(waits))
            command.signal(signal.SIGTERM)
            answers = [answer.result() for answer in waits]
            cut = half.getresponse()
            bodies = [(a.status_code, a.json()) for a in answers] + [(cut.status, json.load(cut))]
            for status, body in bodies:
                assert status == 503
                assert body["error"]["message"] == SHUTTING_DOWN
        assert command.leave() == 0


def test_a_signal_while_the_model_loads(tmp_path):
    with serve_command(tmp_path / "err") as command:
        command.wait_for_stderr("Loading demo ...")
        command.signal(signal.SIGTERM)
        assert command.leave() == 0
        assert command.err.read_text() == "Loading demo ...\n"


def test_a_request_that_waits_for_its_model_is_told(tmp_path):
    """The second model is loaded by a request, and never comes: its folder holds a pipe."""
    (tmp_path / "stuck").mkdir()
    os.mkfifo(tmp_path / "stuck" / "config.json")
    models = "--model", "demo", "--model", f"stuck={tmp_path / 'stuck'}"
    with up(tmp_path, *models) as (command, client), ThreadPoolExecutor() as threads:
        body = {**HI, "model": "stuck"}
        waits = threads.submit(client.post, "/v1/chat/completions", json=body)
        eventually(lambda: client.get("/status").json()["models"][1]["state"] == "loading")
        command.signal(signal.SIGTERM)
        assert waits.result().status_code == 503
        assert SHUTTING_DOWN in waits.result().json()["error"]["message"]
        assert command.leave() == 0


def test_viewers_and_idle_clients_do_not_hold_the_server_up(tmp_path):
    with up(tmp_path) as (command, client), client.stream("GET", "/events") as events:
        lines = events.iter_lines()
        next(lines)
        client.get("/health")  # its connection stays open
        command.signal(signal.SIGTERM)
        list(lines)  # the stream has a proper end
        assert command.leave() == 0


def test_a_client_that_does_not_read_holds_nobody_up(tmp_path):
    with up(tmp_path, "--drain", "0.2") as (command, client), ExitStack() as stack:
        body = json.dumps({**LONG, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((client.base_url.host, client.base_url.port))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        )
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        with streamed(client, "/v1/chat/completions", SHORT) as data:
            *_, done = data
        assert done == "[DONE]"
        command.signal(signal.SIGTERM)
        assert command.leave() == 0
        assert "Traceback" not in command.err.read_text()


def test_an_address_in_use_is_one_line_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_python("-m", "vllm_metal_lite", "serve", "/no/such/model", "--port", port)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port} (--host, --port): ")
    assert done.stderr.count("\n") == 1


def test_an_engine_that_dies_ends_its_streams_and_no_more(tmp_path):
    with up(tmp_path) as (command, client):
        engine = engine_of(client)
        with ExitStack() as streams:
            texts = {**LONG, "prompt": ["one", "two"]}
            asked = {**LONG_BY_PATH, "/v1/completions": texts}
            data = {p: streams.enter_context(streamed(client, p, asked[p])) for p in asked}
            os.kill(engine, signal.SIGKILL)
            for path, events in data.items():
                error = error_at_the_end(path, events)
                assert "SIGKILL" in error["message"]
                assert not path.endswith("completions") or error["code"] == "engine_lost"
        assert status(client)["state"] == "failed"
        assert "SIGKILL" in status(client)["error"]
        assert client.post("/v1/chat/completions", json=SHORT).status_code == 200
        assert (status(client)["state"], status(client)["error"]) == ("loaded", None)
        assert engine_of(client) != engine
        log = command.err.read_text()
        assert "ended by SIGKILL; 5 requests failed; the next request starts a new engine" in log
        command.signal(signal.SIGTERM)
        assert command.leave() == 0


# An engine's process gets no SIGTERM, and at its exit Python waits for processes.
FAILS = """
import asyncio
from tests.support.server.kit import start_engine

async def main():
    engine = await start_engine()
    print(engine.pid, flush=True)
    raise ZeroDivisionError

asyncio.run(main())
"""


def test_a_server_that_fails_ends_its_engine():
    done = run_python("-c", FAILS)
    assert "ZeroDivisionError" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
