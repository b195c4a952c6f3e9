"""`/events` of a real server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.support.cli_kit import SAFETY
from tests.support.server_kit import Running, serving

LONG = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 200}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as server:
        yield server


@contextmanager
def events(running: Running) -> Iterator[Iterator[dict]]:
    def parsed(lines: Iterator[str]) -> Iterator[dict]:
        for line in lines:
            if line.startswith("data: "):
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
