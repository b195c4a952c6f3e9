"""The line of a request in the log."""

import re

import httpx

from tests.support.server_kit import serving


def test_a_line_has_the_tokens_and_the_end(capsys):
    body = {
        "messages": [{"role": "user", "content": "Hello there"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    with serving() as running:
        running.server.logs_requests = True
        reply = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()
    usage, reason = reply["usage"], reply["choices"][0]["finish_reason"]
    tokens = f"{usage['prompt_tokens']} prompt tokens (0 cached), {usage['completion_tokens']} new"
    assert re.fullmatch(
        rf"chatcmpl-\w+: {re.escape(tokens)} in [\d.]+ s, first after [\d.]+ s, {reason}\n",
        capsys.readouterr().out,
    )
