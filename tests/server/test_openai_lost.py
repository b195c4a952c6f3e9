"""An engine's process that dies while answers are streamed."""

import json
import multiprocessing

import httpx
import pytest

from tests.support.server_kit import serving

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["one", "two"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_stream_says_so_and_ends(path):
    body = {**BODIES[path], "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with (
        serving() as running,
        httpx.stream("POST", running.url + path, json=body, timeout=60) as answer,
    ):
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines))["choices"]
        [engine] = multiprocessing.active_children()
        engine.kill()
        *_, last, done = lines
    assert json.loads(last)["error"]["code"] == "engine_lost"
    assert done == "[DONE]"
