"""`/v1/responses`, as the official client sees it, beside chat completions."""

import asyncio
import json
from contextlib import AsyncExitStack

from tests.support.server.kit import user
from vllm_metal_lite import SamplingParams
from vllm_metal_lite.chat_formats.detect import PLAIN
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only
from vllm_metal_lite.server.deltas import deltas
from vllm_metal_lite.server.openai_api.response_events import ResponseReply
from vllm_metal_lite.server.settings import ServerConfig
from vllm_metal_lite.server.stream import EventStream
from vllm_metal_lite.server.worker.messages import Add, Delta
from vllm_metal_lite.server.worker.request_state import RequestState

ASK = "Tell me about a lantern in the rain."
SERVING = {"config": ServerConfig(port=0, keep_alive=0.001)}
LIMITS = {"temperature": 0, "max_output_tokens": 12}


def chat(client, *messages, **options):
    """The text of chat completions, which must be the same."""
    options = {"temperature": 0, "max_tokens": 12, **options}
    reply = client.chat.completions.create(model="demo", messages=list(messages), **options)
    return reply.choices[0].message.content


def test_a_response(client):
    response = client.responses.create(
        model="demo", input=ASK, metadata={"a": "b"}, store=True, truncation="auto", **LIMITS
    )
    assert response.id.startswith("resp_")
    assert response.output_text == chat(client, user(ASK)) != ""
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert (response.store, response.truncation) == (False, "disabled")
    assert (response.metadata, response.max_output_tokens) == ({"a": "b"}, 12)
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + 12


async def test_signs_of_life_are_numbered_events():
    request = RequestState(
        Add("resp_1", [1], SamplingParams(max_tokens=1)), load_tokenizer_only("demo")
    )
    news = deltas([request], lambda: ChatParser(PLAIN))
    reply = ResponseReply(request, news, {}, False, {}, lambda positions: [])
    sent = []

    async def send(message):
        sent.extend(message.get("body", b"").decode().splitlines())
        signs = sent.count("event: response.in_progress") - 1
        if signs > 2 and not request.finished:
            request.take([Delta(0, [5], "", "length")])

    stream = EventStream(reply.stream(), reply.keep_alive, 0.001, AsyncExitStack())
    await stream({}, asyncio.Event().wait, send)
    events = [json.loads(line[6:]) for line in sent if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.incomplete"


def test_a_conversation_is_that_of_chat_completions(client):
    content = [{"type": "output_text", "text": "Hello!", "annotations": []}]
    said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        user("hi"),
        {**said, "content": content},
        user([{"type": "input_text", "text": ASK}]),
    ]
    response = client.responses.create(instructions="A", input=items, **LIMITS)
    system = {"role": "system", "content": "A\n\nB"}
    said = {"role": "assistant", "content": "Hello!"}
    assert response.output_text == chat(client, system, user("hi"), said, user(ASK))
    assert response.instructions == "A"


def test_the_next_turn_finds_the_prefix(client):
    instructions = "Answer in short sentences. " * 8
    first = client.responses.create(instructions=instructions, input=ASK, **LIMITS)
    history = [user(ASK), first.output[0].to_dict(), user("And then?")]
    second = client.responses.create(instructions=instructions, input=history, **LIMITS)
    cached = second.usage.input_tokens_details.cached_tokens
    assert first.usage.input_tokens - 16 <= cached < second.usage.input_tokens


def test_logprobs(client):
    asked = {"input": ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 3, **LIMITS}
    whole = client.responses.create(**asked)
    tokens = whole.output[0].content[0].logprobs
    assert len(tokens) == 12
    assert "".join(token.token for token in tokens) == whole.output_text
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    events = client.responses.create(**asked, stream=True)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [token for delta in deltas for token in delta.logprobs]
    assert [token.token for token in streamed] == [token.token for token in tokens]
