"""Pictures in prompts, without an engine: kept, sent once, placed where a template shows them."""

import json
import pickle
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.images.drawn import (
    READER,
    SEVEN,
    THREE,
    block,
    chat_part,
    response_part,
    said,
    text,
    url,
)
from tests.support.server.kit import user
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.images import eyes
from vllm_metal_lite.images.eyes import Processor
from vllm_metal_lite.images.family import Prepared
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only
from vllm_metal_lite.server.anthropic_api import conversation_of
from vllm_metal_lite.server.conversations import render_prompt
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields, chat_messages
from vllm_metal_lite.server.openai_api.responses import input_messages
from vllm_metal_lite.server.pictures import Pictures
from vllm_metal_lite.server.worker import messages


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


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=12))
def test_pictures_go_to_the_engine_once_while_it_keeps_them(turns):
    """The pipe pickles, the engine keeps 3 of 5 pictures, and one is larger than all it keeps."""
    sizes = [1, 1, 1, 1, 1, 9]
    pictures = [
        Prepared(np.full(n, i, np.uint8), (1, 1), (1, 1), b"%d" % i) for i, n in enumerate(sizes)
    ]
    with patch.object(messages, "SENT_BYTES", 3):
        server, engine = messages.Sent(), messages.Sent()
    for turn in turns:
        asked = [pictures[i] for i in turn]
        sent = pickle.loads(pickle.dumps(server.packed(asked)))
        assert [(p.digest, *p.patches) for p in engine.unpacked(sent)] == [
            (p.digest, *p.patches) for p in asked
        ]
        recent = set(turn)
        if len(recent) <= 3 and 5 not in recent:
            assert server.packed(asked) == [p.digest for p in asked]
            engine.unpacked([p.digest for p in asked])


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


def test_pictures_of_answers_are_shown_where_the_template_shows_them(tmp_path):
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
        with pytest.raises(ApiError, match="an answer with pictures cannot be continued"):
            ConversationFields(**option).conversation([asked, drawn], Pictures(None))


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
    """A forum's markup contains this text, too."""
    parts = [text("[IMG]x[/IMG]"), chat_part(SEVEN)]
    shown, _ = rendered(reader(READER), user("[IMG]"), user(parts))
    assert shown == "<s>[INST][ IMG][/INST][INST][ IMG]x[/IMG]#[/INST]"


def test_text_parts_are_joined_as_ever(tmp_path):
    shown, _ = rendered(reader(READER), user([text("a"), text("b"), chat_part(SEVEN), text("c")]))
    assert shown == "<s>[INST]a\nb#c[/INST]"


def by_chat(parts, is_result):
    result = {"role": "function", "content": parts if is_result else "see:"}
    return chat_messages([result, user("a" if is_result else parts)])


def by_messages(parts, is_result):
    result = {"type": "tool_result", "tool_use_id": "1", "content": parts if is_result else "see:"}
    turns = [user([result])] if is_result else [user([result]), user(parts)]
    return conversation_of([*turns], None).messages


def by_responses(parts, is_result):
    kind = {"type": "function_call_output", "call_id": "1"}
    result = {**kind, "output": parts if is_result else "see:"}
    return input_messages([result, user("a" if is_result else parts)], None)


@pytest.mark.parametrize("is_result", [True, False], ids=["in it", "behind it"])
@pytest.mark.parametrize(
    ("door", "part", "kind"),
    [
        (by_chat, chat_part("x"), "image_url"),
        (by_messages, {"type": "image", "source": {}}, "image"),
        (by_responses, response_part("x"), "input_image"),
    ],
)
def test_a_picture_of_a_tool_is_named_to_a_model_of_text(door, part, kind, is_result):
    found = door([text("A picture:"), part], is_result)
    [said] = [m["content"] for m in found if "picture" in m["content"]]
    assert said == f"A picture:\n[{kind}: left out, since the model takes text only]"


def test_a_model_that_takes_no_pictures_says_why():
    blind = Pictures("x takes no pictures here: its tower is not built")
    asked = [user([block(SEVEN)])]
    with pytest.raises(ApiError, match="takes text only, got a part of type 'image': x takes no"):
        conversation_of(asked, None, blind)
    asked = [user([response_part(SEVEN)])]
    with pytest.raises(ApiError, match=r"input\.0\.content\.0: .*its tower is not built"):
        input_messages(asked, None, blind)
    assert blind.found == []
