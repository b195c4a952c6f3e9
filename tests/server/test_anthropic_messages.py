"""`/v1/messages`, as the official client sees it, beside chat completions."""

import anthropic
import pytest

from tests.support.server.kit import OPTIONS, user
from vllm_metal_lite.server.settings import ServerConfig

ASK = "Tell me about a lantern in the rain."
OWN = {"temperature", "top_k", "seed", "min_p", "ignore_eos"}
SERVING = {"config": ServerConfig(port=0, keep_alive=0.001)}
LIMITS = {"model": "demo", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(running):
    with anthropic.Anthropic(base_url=running.url, **OPTIONS) as client:
        yield client


def request(*messages, **options):
    """Arguments of the client, which sends what it has no argument for in `extra_body`."""
    options = {**LIMITS, "messages": list(messages), **options}
    sampling = {name: options.pop(name) for name in OWN.intersection(options)}
    return {**options, "extra_body": sampling}


def create(client, *messages, **options):
    return client.messages.create(**request(*messages, **options))


def chat(http, *messages, **options):
    """Ask the same of /v1/chat/completions; returns its only choice, whose text must equal the
    message's."""
    body = {"messages": list(messages), **LIMITS, **options}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    return reply.json()["choices"][0]


def text(message):
    [block] = message.content
    return block.text


def test_a_message(client, http):
    message = create(client, user(ASK), metadata={"user_id": "1"}, service_tier="auto")
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert text(message) == chat(http, user(ASK))["message"]["content"] != ""
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 12
    assert message._request_id.startswith("req_")


def test_a_stream_counts_the_prompt_before_its_cached_part_is_known(client):
    first, *_, end, _ = create(client, user(ASK), stream=True)
    start = first.message
    assert (start.content, start.stop_reason) == ([], None)
    assert start.usage.input_tokens == end.usage.input_tokens + end.usage.cache_read_input_tokens
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("max_tokens", 12)


def test_the_raw_stream_has_a_ping(http):
    body = {**LIMITS, "messages": [user(ASK)], "stream": True}
    reply = http.post("/v1/messages", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["request-id"].startswith("req_")
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in reply.text
    assert reply.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_usage_tells_cached_tokens_from_others(client):
    system = "Answer in short sentences. " * 8
    first = create(client, user(ASK), system=system)
    history = [user(ASK), {"role": "assistant", "content": text(first)}, user("And then?")]
    again = create(client, *history, system=system)
    count = client.messages.count_tokens(model="demo", system=system, messages=history)
    usage = again.usage
    assert usage.cache_creation_input_tokens == 0
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens
    assert usage.cache_read_input_tokens >= first.usage.input_tokens - 16


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(client, stream):
    whole = text(create(client, user(ASK), max_tokens=200))
    stop = whole.split()[3]
    options = {"stop_sequences": ["never said", stop], "max_tokens": 200}
    if stream:
        with client.messages.stream(**request(user(ASK), **options)) as events:
            message = events.get_final_message()
    else:
        message = create(client, user(ASK), **options)
    assert text(message) == whole[: whole.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_goes_on_where_the_assistant_began(client, http):
    messages = [user(ASK), {"role": "assistant", "content": "The lantern"}]
    expected = chat(http, *messages, continue_final_message=True, add_generation_prompt=False)
    assert text(create(client, *messages)) == expected["message"]["content"]


# What Claude Code sends at first, in short.
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE = {
    "model": "demo",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-billing: 1"},
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Be brief.", **CACHED},
    ],
    "messages": [
        user([{"type": "text", "text": "<context>"}, {"type": "text", "text": "Say hello"}]),
        {"role": "system", "content": "The date is today."},
    ],
    "tools": [{"name": "Read", "description": "", "input_schema": {"type": "object"}}],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "{}"},
    "stream": True,
}
HEADERS = {
    "x-api-key": "x",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
}


@pytest.mark.parametrize("changes", [{}, {"tools": []}, {"tool_choice": {"type": "none"}}])
def test_the_first_request_of_claude_code(http, changes):
    body = {**CLAUDE_CODE, "max_tokens": 4, **changes}
    served = http.post("/v1/messages?beta=true", json=body, headers=HEADERS)
    assert served.status_code == 200, served.text
    assert served.text.endswith('data: {"type":"message_stop"}\n\n')
