"""`/events` of a real server."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import httpx

from tests.support.server.cli_kit import SAFETY
from tests.support.server.command import eventually
from tests.support.server.kit import Running, serving
from vllm_metal_lite.server.live import Live

LONG = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 200}


@contextmanager
def events(running: Running, name: str = "engine") -> Iterator[Iterator[Any]]:
    def parsed(lines: Iterator[str]) -> Iterator[Any]:
        for line in lines:
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: ") and event == name:
                yield json.loads(line.removeprefix("data: "))

    with httpx.stream("GET", f"{running.url}/events", timeout=SAFETY) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield parsed(response.iter_lines())


def test_a_viewer_gets_an_event_at_once(running):
    with events(running) as seen:
        first = next(seen)
    assert first["model"] == "demo"
    assert first["requests"] == []
    assert first["blocks"]["total"] == 256
    assert first["metrics"]["requests_running"] == 0


def test_all_viewers_see_the_work_and_its_end(running):
    with events(running) as one, events(running) as two:
        next(one), next(two)
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=LONG, timeout=60)
        assert answer.status_code == 200
        for seen in one, two:
            steps, requests = [], {}
            for event in seen:
                steps += event["steps"]
                requests |= {r["n"]: r["id"] for r in event["requests"]}
                if steps and not event["requests"]:
                    break
            assert len(steps) > 1
            assert all(code <= 0 for code, _ in event["blocks"]["runs"])


def test_an_event_that_comes_after_the_last_viewer_has_left_is_not_kept():
    live = Live(Mock())
    live._send_engine("demo", "{}")
    assert live._latest == {}


@contextmanager
def asked_while_silent(running: Running) -> Iterator[None]:
    """A request waits, and its engine does nothing."""
    (client,) = running.server.models.loaded.values()
    ask = {"url": f"{running.url}/v1/chat/completions", "json": LONG, "timeout": 60}
    asking = threading.Thread(target=httpx.post, kwargs=ask)
    os.kill(client.pid, signal.SIGSTOP)
    try:
        asking.start()
        yield
    finally:
        os.kill(client.pid, signal.SIGCONT)
    asking.join()


def test_the_server_counts_what_a_silent_engine_does_not_tell(running):
    with events(running, "models") as seen:
        idle = [{"model": "demo", "state": "loaded", "error": None, "requests": 0}]
        assert any(states == idle for states in seen)
        with asked_while_silent(running):
            assert any(states[0]["requests"] == 1 for states in seen)


def test_an_engine_that_is_alive_and_silent_is_stuck(running, monkeypatch):
    monkeypatch.setattr("vllm_metal_lite.server.worker.client._STUCK_SECONDS", 0.2)
    health = partial(httpx.get, f"{running.url}/health", timeout=60)
    time.sleep(0.3)
    assert health().json() == {"status": "ok"}  # an idle engine says nothing
    with asked_while_silent(running):
        stuck = eventually(lambda: (answer := health()).status_code == 503 and answer)
        assert stuck.json() == {"status": "stuck", "models": ["demo"]}
        assert httpx.get(f"{running.url}/status", timeout=60).json()["models"][0]["stuck"]
    assert health().status_code == 200


def test_the_end_of_an_engine_is_told():
    with serving() as running, events(running, "models") as seen:
        next(seen)
        (client,) = running.server.models.loaded.values()
        os.kill(client.pid, signal.SIGKILL)
        (failed,) = next(states for states in seen if states[0]["state"] != "loaded")
        assert (failed["state"], failed["requests"]) == ("failed", 0)
        assert "SIGKILL" in failed["error"]
