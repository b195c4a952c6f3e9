"""A server whose output nobody takes: lines are lost, and nothing else."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.server.cli_kit import SAFETY
from tests.support.server.command import Command, eventually, serve_command

pytestmark = pytest.mark.long

ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@contextmanager
def up(tmp_path: Path) -> Iterator[tuple[Command, httpx.Client, int]]:
    """A server with two models, and the reading end of its stderr."""
    fifo = tmp_path / "err"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    models = "--model", "one=demo", "--model", "two=demo"
    with (
        serve_command(fifo, *models, "--log-requests") as command,
        httpx.Client(base_url=command.url(), timeout=SAFETY) as client,
    ):
        yield command, client, reader


def serves_all(client: httpx.Client) -> None:
    """Each of these makes the server log a line, or more."""
    chat = "/v1/chat/completions"
    assert client.post(chat, json={**ASK, "unknown": 1}).status_code == 200
    assert client.post(chat, json={**ASK, "model": "two"}).status_code == 200
    os.kill(client.get("/status").json()["models"][0]["pid"], signal.SIGKILL)
    eventually(lambda: client.get("/status").json()["models"][0]["state"] == "failed")
    assert client.post(chat, json=ASK).status_code == 200


def test_a_server_whose_output_has_no_reader_serves_and_stops(tmp_path):
    with up(tmp_path) as (command, client, reader):
        os.close(reader)  # `serve 2>&1 | tee log`, and `tee` ends
        command.stop_reading()
        serves_all(client)
        command.signal(signal.SIGTERM)
        assert command.leave() == 0


def test_a_terminal_that_is_paused_holds_no_request_up(tmp_path):
    with up(tmp_path) as (command, client, reader):
        fill(tmp_path / "err")  # as Ctrl-S does: a write waits
        serves_all(client)
        command.signal(signal.SIGTERM)
        assert command.leave() == 0
        os.close(reader)


def fill(fifo: Path) -> None:
    writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"." * size)
    os.close(writer)
