"""Pictures in requests of each API, read by a tiny model that sees digits and colours."""

import base64
import json
import random
import shutil
from io import BytesIO
from pathlib import Path

import anthropic
import httpx
import pytest
from PIL import Image

from tests.support.server.kit import OPTIONS, serving, user
from tools.demo_model.train_reader import draw
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.images import eyes
from vllm_metal_lite.images.eyes import Processor
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only
from vllm_metal_lite.server.anthropic_api import conversation_of
from vllm_metal_lite.server.conversations import render_prompt
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields
from vllm_metal_lite.server.openai_api.responses import input_messages
from vllm_metal_lite.server.pictures import Pictures
from vllm_metal_lite.server.served_model import ModelSpec

READER = Path(__file__).parents[1] / "support" / "images" / "reader"
SERVING = {"specs": [ModelSpec("reader", str(READER))]}
DIGIT, COLOUR = "Which digit is this?", "Which colour is it?"


def base64_of(image: Image.Image) -> str:
    out = BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def url(digit: int, colour: str = "red") -> str:
    rgb = draw(digit, colour, random.Random(digit))
    return f"data:image/png;base64,{base64_of(Image.fromarray(rgb))}"


SEVEN, THREE = url(7), url(3, "blue")
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def response_part(url: str) -> dict:
    return {"type": "input_image", "image_url": url, "detail": "high"}


def block(url: str) -> dict:
    kind, data = url.removeprefix("data:").split(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def text(words: str, kind: str = "text") -> dict:
    return {"type": kind, "text": words}


def said(words: str) -> dict:
    return {"role": "assistant", "content": words}


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
    for path, name, given in (
        ("chat/completions", "messages", chat_part(bad)),
        ("responses", "input", response_part(bad)),
        ("messages", "messages", {"type": "image", "source": {"type": "url", "url": bad}}),
    ):
        words_kind = "input_text" if name == "input" else "text"
        body = {name: [user([text("a", words_kind), given])], "max_tokens": 5}
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


def test_documents_of_pages_are_refused_and_do_not_end_an_agents_session(http):
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


def test_a_later_turn_decodes_nothing(monkeypatch):
    processor = Processor.of_folder(READER)
    first = processor.of(SEVEN)
    monkeypatch.setattr(eyes, "read", None)
    assert processor.of(SEVEN) is first
    with pytest.raises(TypeError):
        processor.of(THREE)


def test_a_picture_counts_once_among_those_that_are_kept(monkeypatch):
    size = Processor.of_folder(READER).of(SEVEN).patches.nbytes
    monkeypatch.setattr(eyes, "PREPARED_BYTES", 2 * size)
    processor = Processor.of_folder(READER)
    kept = [processor.of(SEVEN), processor.of(THREE)]
    assert processor.of(THREE) is kept[1]
    assert processor.of(SEVEN) is kept[0]
    processor.of(url(5))  # the three leaves
    assert processor.of(SEVEN) is kept[0]
    again = processor.of(THREE)
    assert again is not kept[1]
    assert again.digest == kept[1].digest


# Rendering, without an engine


def reader(folder: Path, template: str | None = None) -> ModelText:
    """The text side of the reader, with another template."""
    if template is not None:
        shutil.copytree(READER, folder, dirs_exist_ok=True)
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "chat_template": template}))

    class Facts:
        name, uses_checkpoints, max_model_len, no_pictures = "reader", False, 1024, None

    return ModelText(Facts, load_tokenizer_only(folder), Processor.of_folder(folder))


PLAIN = json.loads((READER / "tokenizer_config.json").read_text())["chat_template"]
# Tools get text alone, as in many templates.
NO_TOOL_PICTURES = PLAIN.replace(
    "{% elif message.content is string %}",
    "{% elif message.role == 'tool' %}<{{ message.content if message.content is string else '?' }}>"
    "{% elif message.content is string %}",
)
MOVED = "The user's message has the picture."
STRINGS = "{% for m in messages %}{{ m.role[0] + ':' + m.content }}\n{% endfor %}"


def rendered(model: ModelText, *messages) -> tuple[str, list[int]]:
    """The prompt with one mark for each picture, and the digests' first bytes in order."""
    pictures = Pictures(None)
    conversation = ConversationFields().conversation(list(messages), pictures)
    prompt = render_prompt(model, conversation, False)
    whole = model.tokenizer.decode(prompt.token_ids)
    row = "[IMG]" * 4
    picture = "[IMG_BREAK]".join([row] * 4) + "[IMG_END]"
    assert whole.count("[IMG]") == 16 * len(prompt.pictures)
    return whole.replace(picture, "#"), [p.digest for p in prompt.pictures]


def digests(model: ModelText, *urls: str) -> list[bytes]:
    return [rendered(model, user([chat_part(url)]))[1][0] for url in urls]


def test_pictures_of_tools_go_to_the_user_if_the_template_leaves_them_out(tmp_path):
    model = reader(tmp_path, NO_TOOL_PICTURES)
    result = {"role": "tool", "content": [text("a"), chat_part(SEVEN)]}
    other = {"role": "tool", "content": [chat_part(THREE)]}
    names = digests(model, SEVEN, THREE)
    shown, found = rendered(model, user("q"), result, other)
    assert shown == f"<s>[INST]q[/INST]<a><{MOVED}>[INST]##[/INST]"
    assert found == names
    shown, found = rendered(model, result, user("q"), said("b"), other, said("c"))
    assert shown == f"<s><a>[INST]#q[/INST]b</s><{MOVED}>[INST]#[/INST]c</s>"
    assert found == names
    own = user([text("q"), chat_part(THREE)])
    shown, found = rendered(model, result, own)
    assert (shown, found) == ("<s><a>[INST]#q#[/INST]", names)
    assert rendered(reader(READER), result)[0] == "<s>[INST]a#[/INST]"  # this template shows it


def test_pictures_of_answers_are_shown_where_the_template_shows_them(tmp_path, http):
    """As in templates of Qwen3.5 and Gemma; those of Qwen3-VL leave them out."""
    drawn = {"role": "assistant", "content": [text("a"), chat_part(SEVEN)]}
    hides = STRINGS.replace("m.content", "'x'")
    with pytest.raises(RequestError, match=r"0 places .*, in messages of the roles assistant"):
        rendered(reader(tmp_path, hides), user("q"), drawn, user("r"))
    shows = PLAIN.replace("message.role == 'assistant'", "message.role == 'nobody'")
    model, asked = reader(tmp_path, shows), user([chat_part(THREE)])
    shown, found = rendered(model, user("q"), drawn, asked)
    assert shown == "<s>[INST]q[/INST][INST]a#[/INST][INST]#[/INST]"
    assert found == digests(model, SEVEN, THREE)
    for option in {"continue_final_message": True}, {"add_generation_prompt": False}:
        body = {"messages": [user("q"), drawn], **option}
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400
        assert "an answer with pictures cannot be continued" in reply.json()["error"]["message"]


def test_pictures_of_tools_go_before_them_if_no_user_may_come_after(tmp_path):
    """As in Mistral Small's template."""
    no_user = "{% if loop.previtem and loop.previtem.role == 'tool' and message.role == 'user' %}"
    no_user += "{{ raise_exception('roles must alternate') }}{% endif %}"
    begin = "{% for message in messages %}"
    model = reader(tmp_path, NO_TOOL_PICTURES.replace(begin, begin + no_user, 1))
    result = {"role": "tool", "content": [text("a"), chat_part(SEVEN)]}
    plain = {"role": "tool", "content": "b"}
    shown, found = rendered(model, user("q"), plain, result, said("c"), user("d"))
    assert shown == "<s>[INST]q#[/INST]<b><a>c</s>[INST]d[/INST]"
    assert found == digests(model, SEVEN)
    with pytest.raises(RequestError, match="0 places for pictures"):
        rendered(model, result)


def test_results_that_a_format_sorts_keep_their_pictures(tmp_path, monkeypatch):
    model = reader(READER)
    swap = lambda messages: [messages[1], messages[0]]  # noqa: E731
    model.chat_format = model.chat_format.__class__(**{**vars(model.chat_format), "adapt": swap})
    _, found = rendered(model, user([chat_part(SEVEN)]), user([chat_part(THREE)]))
    assert found == digests(reader(READER), THREE, SEVEN)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}a{% endfor %}", r"0 places for pictures \(\[IMG\]\), and 1"),
        (STRINGS, "refuses"),
        (PLAIN + "[IMG]", "2 places for pictures .* and 1 pictures are given"),
    ],
)
def test_places_that_do_not_match_are_counted(tmp_path, template, words):
    with pytest.raises(RequestError, match=words):
        rendered(reader(tmp_path, template), user([chat_part(SEVEN)]))


def test_a_placeholder_in_a_text_is_no_place_for_a_picture():
    """A forum's markup has it, too."""
    parts = [text("[IMG]x[/IMG]"), chat_part(SEVEN)]
    shown, _ = rendered(reader(READER), user("[IMG]"), user(parts))
    assert shown == "<s>[INST][ IMG][/INST][INST][ IMG]x[/IMG]#[/INST]"


def test_text_parts_are_joined_as_ever(tmp_path):
    shown, _ = rendered(reader(READER), user([text("a"), text("b"), chat_part(SEVEN), text("c")]))
    assert shown == "<s>[INST]a\nb#c[/INST]"


def test_a_model_that_takes_no_pictures_says_why():
    blind = Pictures("x takes no pictures here: its tower is not built")
    asked = [user([block(SEVEN)])]
    with pytest.raises(ApiError, match="takes text only, got a part of type 'image': x takes no"):
        conversation_of(asked, None, blind)
    asked = [user([response_part(SEVEN)])]
    with pytest.raises(ApiError, match=r"input\.0\.content\.0: .*its tower is not built"):
        input_messages(asked, None, blind)
    assert blind.found == []
