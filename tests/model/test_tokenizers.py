"""The chat template of a model's folder, in each of its possible places."""

import json

import pytest

from tests.support.models import tiny_models
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only

CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}json {{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path):
    """A model without a template, but for chat_template.json."""
    path = tiny_models.write_folder(tmp_path / "m")
    tiny_models.edit(path / "tokenizer_config.json", chat_template=...)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def rendered(folder) -> str:
    tokenizer = load_tokenizer_only(str(folder))
    assert tokenizer.has_chat_template
    return tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_a_template_for_the_processor_serves_the_tokenizer(folder):
    assert rendered(folder) == "json hi"


def test_a_template_for_the_tokenizer_comes_first(folder):
    (folder / "chat_template.jinja").write_text("jinja")
    assert rendered(folder) == "jinja"
    (folder / "chat_template.jinja").unlink()
    tiny_models.edit(folder / "tokenizer_config.json", chat_template="config")
    assert rendered(folder) == "config"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"chat_template": {"a": "b"}}'])
def test_a_file_without_a_template_is_ignored_and_named(folder, text, caplog):
    (folder / "chat_template.json").write_text(text)
    assert not load_tokenizer_only(str(folder)).has_chat_template
    assert "chat_template.json" in caplog.text
