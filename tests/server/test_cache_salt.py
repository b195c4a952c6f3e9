"""`cache_salt`: requests share computed prefixes only with those of the same salt."""

import pytest

TEXT = "The lantern in the rain, " * 12
CHAT = [{"role": "user", "content": TEXT}]
BODIES = {
    "completions": {"prompt": TEXT, "max_tokens": 1},
    "chat/completions": {"messages": CHAT, "max_tokens": 1},
    "responses": {"input": TEXT, "max_output_tokens": 1},
    "messages": {"messages": CHAT, "max_tokens": 1},
}


@pytest.mark.parametrize("api", BODIES)
def test_a_salt_parts_the_cache(http, api):
    found = []
    for salt in (None, f"mine, {api}", f"mine, {api}", f"yours, {api}"):
        reply = http.post(f"/v1/{api}", json={**BODIES[api], "cache_salt": salt})
        usage = reply.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        found.append(details["cached_tokens"] if details else usage["cache_read_input_tokens"])
    assert found[1] == found[3] == 0 < found[2]
