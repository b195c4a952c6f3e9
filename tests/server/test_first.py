"""The way of a request, end to end."""

import httpx

from tests.support.server_kit import serving

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def test_a_chat_streamed_and_not():
    with serving() as running, httpx.Client(base_url=running.url, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ok"}
        whole = client.post("/v1/chat/completions", json=HI)
        assert whole.status_code == 200
        streamed = client.post("/v1/chat/completions", json={**HI, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        bad = client.post("/v1/chat/completions", json={"messages": 5})
        assert bad.status_code == 400
        assert not running.server.generations
