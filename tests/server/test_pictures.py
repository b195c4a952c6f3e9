"""Pictures in requests of each API, read by a tiny model that sees digits and colours."""

import random

import anthropic
import httpx
import pytest
from PIL import Image

from tests.support.images.drawn import (
    COLOUR,
    DIGIT,
    READER,
    SEVEN,
    THREE,
    base64_of,
    block,
    chat_part,
    response_part,
    said,
    text,
    url,
)
from tests.support.server.kit import OPTIONS, serving, user
from vllm_metal_lite.server.anthropic_api import conversation_of
from vllm_metal_lite.server.pictures import Pictures
from vllm_metal_lite.server.served_model import ModelSpec

SERVING = {"specs": [ModelSpec("reader", str(READER))]}
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat(client, *messages):
    return client.chat.completions.create(
        model="reader", messages=list(messages), max_tokens=20, temperature=0
    )


def answer(client, *messages) -> str:
    return chat(client, *messages).choices[0].message.content


@pytest.fixture(scope="module")
def claude(running):
    with anthropic.Anthropic(base_url=running.url, **OPTIONS) as client:
        yield client


def test_chat(client):
    asked = [user([chat_part(SEVEN), text(DIGIT)])]
    assert answer(client, *asked) == "It is a 7."
    assert answer(client, user([{**chat_part(SEVEN), "image_url": SEVEN}, text(DIGIT)])) == (
        "It is a 7."
    )
    chunks = client.chat.completions.create(
        model="reader", messages=asked, temperature=0, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "It is a 7."


def test_responses(client):
    asked = [user([response_part(SEVEN), text(DIGIT, "input_text")])]
    how = {"model": "reader", "input": asked, "temperature": 0}
    assert client.responses.create(**how).output_text == "It is a 7."
    with client.responses.stream(**how) as stream:
        assert stream.get_final_response().output_text == "It is a 7."


def test_messages(claude):
    asked = [user([block(SEVEN), text(DIGIT)])]
    how = {"model": "reader", "messages": asked, "max_tokens": 20}
    whole = claude.messages.create(**how)
    assert whole.content[0].text == "It is a 7."
    with claude.messages.stream(**how) as stream:
        assert stream.get_final_text() == "It is a 7."
    by_url = {"type": "image", "source": {"type": "url", "url": THREE}}
    how["messages"] = [user([by_url, text(DIGIT)])]
    assert claude.messages.create(**how).content[0].text == "It is a 3."
    counted = claude.messages.count_tokens(model="reader", messages=asked).input_tokens
    usage = whole.usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens > 16  # 16 rows


def test_a_later_turn_and_another_picture(client):
    first = user([chat_part(SEVEN), text(DIGIT)])
    talk = [first, said("It is a 7."), user(COLOUR)]
    chat(client, first)
    seen = chat(client, *talk)
    assert seen.choices[0].message.content == "It is red."
    assert seen.usage.prompt_tokens_details.cached_tokens >= 16
    other = [user([chat_part(url(5, "blue")), text(DIGIT)]), *talk[1:]]
    seen = chat(client, *other)
    assert seen.choices[0].message.content == "It is blue."
    assert seen.usage.prompt_tokens_details.cached_tokens < 16
    two = [*talk[:2], user([chat_part(THREE), text(DIGIT)])]
    assert answer(client, *two) == "It is a 3."


def test_results_of_tools(client, claude):
    """The reader's template shows pictures in all roles."""
    call = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "1"}]}
    result = {"role": "tool", "tool_call_id": "1", "content": [chat_part(SEVEN)]}
    assert answer(client, user("Look."), call, result, user(DIGIT)) == "It is a 7."
    beside = {**result, "content": "Image read successfully"}  # as OpenCode sends it
    assert answer(client, call, beside, user([chat_part(SEVEN), text(DIGIT)])) == "It is a 7."

    used = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block(SEVEN)]}
    messages = [user("Look."), said([used]), user([result, text(DIGIT)])]
    how = {"model": "reader", "max_tokens": 20}
    assert claude.messages.create(messages=messages, **how).content[0].text == "It is a 7."
    plain = {**result, "content": "ok"}
    messages[2] = user([plain, block(THREE), text(DIGIT)])
    assert claude.messages.create(messages=messages, **how).content[0].text == "It is a 3."

    items = [
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [response_part(SEVEN)]},
        user(DIGIT),
    ]
    response = client.responses.create(model="reader", input=items, temperature=0)
    assert response.output_text == "It is a 7."


DAMAGED = SEVEN[:-400]
TOO_LARGE = base64_of(Image.new("1", (8000, 4001)))
TOO_LARGE = f"data:image/png;base64,{TOO_LARGE}"
BAD = [
    (DAMAGED, "cannot be decoded"),
    (TOO_LARGE, "8000 x 4001 pixels; it must have 1 to 32,000,000"),
    ("https://example.org/a.png", "fetches no pictures; send a data: URL"),
    ("data:image/png;base64,*", "no base64"),
    ("data:image/png;base64,\u00e9", "no base64"),
    ("file:///etc/hosts", "must be data:image/...;base64"),
    (None, "a data: URL"),
]


@pytest.mark.parametrize(
    ("bad", "words"), BAD, ids=["cut", "large", "http", "text", "accent", "file", "no"]
)
def test_a_bad_picture_is_named_with_its_place(http, bad, words):
    for path, name, part in (
        ("chat/completions", "messages", chat_part(bad)),
        ("responses", "input", response_part(bad)),
        ("messages", "messages", {"type": "image", "source": {"type": "url", "url": bad}}),
    ):
        words_kind = "input_text" if name == "input" else "text"
        body = {name: [user([text("a", words_kind), part])], "max_tokens": 5}
        reply = http.post(f"/v1/{path}", json=body)
        assert reply.status_code == 400, reply.text
        message = reply.json()["error"]["message"]
        assert words in message
        assert message.startswith(f"{name}.0.content.1")
        assert len(message) < 400


def test_too_many_pictures(http):
    body = {"messages": [user([chat_part(SEVEN)] * 101)]}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "messages.0.content.100: a prompt takes at most 100 pictures (limit_mm_per_prompt), got 101"
    )


def test_a_large_file_is_no_long_prompt(client):
    """Base64 of more characters than any prompt may have."""
    noise = random.Random(0).randbytes(1200 * 1200 * 3)
    large = base64_of(Image.frombytes("RGB", (1200, 1200), noise))
    assert len(large) > 5_000_000
    parts = [chat_part(f"data:image/png;base64,{large}"), text(DIGIT)]
    assert chat(client, user(parts)).usage.prompt_tokens == 43


LEFT_OUT = "chat templates leave out pictures of system messages"


def test_other_parts_and_places_take_no_pictures(http):
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    for message, words in (
        (user([sound]), "takes text and pictures only, got a part of type 'input_audio'"),
        ({"role": "system", "content": [chat_part(SEVEN)]}, LEFT_OUT),
    ):
        reply = http.post("/v1/chat/completions", json={"messages": [message, user("a")]})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
    items = [{"role": "developer", "content": [response_part(SEVEN)]}, user("a")]
    reply = http.post("/v1/responses", json={"input": items})
    assert (reply.status_code, LEFT_OUT in reply.text) == (400, True)
    turns = [{"role": "system", "content": [block(SEVEN)]}, user("a")]
    reply = http.post("/v1/messages", json={"messages": turns, "max_tokens": 5})
    assert (reply.status_code, LEFT_OUT in reply.text) == (400, True)


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
DOCUMENT = {"type": "document", "source": PDF}


def test_a_pdf_is_refused_and_does_not_end_an_agents_session(http):
    body = {"messages": [user([DOCUMENT, text("a")])], "max_tokens": 5}
    reply = http.post("/v1/messages", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "messages.0.content.0: this server takes text and pictures only, got a part of type "
        "'document' and 'application/pdf'"
    )
    # Claude Code sends a PDF that it read in the user's message behind the result.
    used = said([{"type": "tool_use", "id": "1", "name": "look", "input": {}}])
    result = {"type": "tool_result", "tool_use_id": "1", "content": "PDF file read"}
    note = "[document of application/pdf: left out, since the model takes text and pictures only]"
    pictures = Pictures(None, 9)
    for turns in (
        [user([{**result, "content": [DOCUMENT]}])],
        [user([result, DOCUMENT])],
        [user([result]), user([DOCUMENT, block(SEVEN)])],
    ):
        messages = conversation_of([used, *turns], None, pictures).messages
        assert note in str(messages[-1]["content"])
    assert len(pictures.found) == 1


def test_usage_counts_the_rows_of_pictures(client, claude, http):
    """16 rows, 3 breaks and an end a picture; the rest is text."""
    parts = [chat_part(SEVEN), chat_part(THREE), text(DIGIT)]
    asked, plain = [user(parts)], [user([text(DIGIT)])]
    of_text = chat(client, *plain).usage.prompt_tokens
    expected = of_text + 2 * (16 + 3 + 1)
    assert chat(client, *asked).usage.prompt_tokens == expected
    how = {"model": "reader", "temperature": 0, "stream": True}
    how["stream_options"] = {"include_usage": True}
    *_, last = client.chat.completions.create(messages=asked, **how)
    assert last.usage.prompt_tokens == expected
    assert http.post("/tokenize", json={"messages": asked}).json()["count"] == expected

    items = [user([response_part(SEVEN), response_part(THREE), text(DIGIT, "input_text")])]
    how = {"model": "reader", "input": items}
    assert client.responses.create(**how).usage.input_tokens == expected
    with client.responses.stream(**how) as stream:
        assert stream.get_final_response().usage.input_tokens == expected

    turns = [user([block(SEVEN), block(THREE), text(DIGIT)])]
    how = {"model": "reader", "messages": turns, "max_tokens": 20}
    with claude.messages.stream(**how) as stream:
        for usage in stream.get_final_message().usage, claude.messages.create(**how).usage:
            assert usage.input_tokens + usage.cache_read_input_tokens == expected
    del how["max_tokens"]
    assert claude.messages.count_tokens(**how).input_tokens == expected


def test_the_model_says_what_it_takes(http):
    assert http.get("/v1/models/reader").json()["input_modalities"] == ["text", "image"]


def test_a_model_of_text():
    """It refuses a picture, and a note replaces one in a result."""
    with serving() as running, httpx.Client(base_url=running.url, timeout=60) as http:
        assert http.get("/v1/models/demo").json()["input_modalities"] == ["text"]
        ask = user([chat_part(SEVEN), text(DIGIT)])
        reply = http.post("/v1/chat/completions", json={"messages": [ask]})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == (
            "messages.0.content.0: this server takes text only, got a part of type 'image_url': "
            "demo takes text only"
        )
