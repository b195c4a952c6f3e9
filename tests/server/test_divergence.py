"""Where a prompt diverges from recent ones: in the log, and in `usage`."""

import httpx
from hypothesis import given
from hypothesis import strategies as st

from tests.support.server_kit import serving
from vllm_metal_lite.server.divergence import Divergence, RecentPrompts, find_divergence
from vllm_metal_lite.server.server import summary

ids = st.lists(st.integers(0, 2), max_size=8)


@given(known=st.lists(ids, max_size=5), new=ids)
def test_the_place_is_behind_the_longest_common_prefix(known, new):
    recent = RecentPrompts()
    for token_ids in known:
        recent.add(token_ids)

    def common(other):
        pairs = zip(other, new, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(other), len(new)))

    longest = max(map(common, known), default=0)
    goes_on = any(common(k) == longest == len(k) for k in known)
    ends = longest == len(new)
    at = recent.diverges_at(new)
    assert at == (None if goes_on or ends or not longest else longest)


def test_the_message_is_named():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": "Hello again"},
    ]
    text = "Be brief. Hello [call] Hello again"
    recent = RecentPrompts()
    recent.add([ord(c) for c in text[:20] + "changed"])

    def divergence(prompt: str) -> Divergence | None:
        new = [ord(c) for c in prompt]
        return find_divergence(recent, new, messages, lambda some: "".join(map(chr, some)))

    assert divergence(text) == Divergence(20, "message 2, assistant")
    assert divergence("Be loud") == Divergence(3, "message 0, system")
    assert divergence("other") is None


def test_requests_report_it():
    def ask(*messages: tuple[str, str]) -> dict:
        body = {
            "messages": [{"role": r, "content": c} for r, c in messages],
            "max_tokens": 4,
            "temperature": 0,
        }
        reply = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
        return reply.json()

    with serving() as running:
        lines = []
        running.server.on_end = lambda request: lines.append(summary(request))
        first = ask(("system", "You are kind."), ("user", "Hello there"))
        assert "metal_lite" not in first["usage"]
        answer = first["choices"][0]["message"]["content"]
        other = ask(("system", "You are kind."), ("user", "Goodbye"), ("user", answer or "x"))
        diverged = other["usage"]["metal_lite"]
        assert diverged["diverged_in"] == "message 1, user"
        assert 0 < diverged["diverged_at"] < other["usage"]["prompt_tokens"]
        assert "diverged at token" not in lines[0]
        assert f"diverged at token {diverged['diverged_at']}: message 1, user" in lines[1]
