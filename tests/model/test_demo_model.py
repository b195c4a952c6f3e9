"""The demo model in the package: loads, fits its limits, recalls, and is prefix-stable."""

import json
import sys

import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import generate_step
from tokenizers import Tokenizer

from tools.demo_model import data, recall, train
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files.find import DEMO_PATH


@pytest.fixture(scope="module")
def loaded():
    return load(str(DEMO_PATH))


def reply_ids(loaded, prompt):
    """The greedy answer, with its end token."""
    model, tokenizer = loaded
    answer = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=64):
        answer.append(int(token))
        if token in tokenizer.eos_token_ids:
            break
    return answer


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


def test_size_and_files(loaded):
    model, _ = loaded
    arrays = [array for _, array in tree_flatten(model.parameters())]
    assert sum(array.size for array in arrays) <= 3_000_000
    assert all(array.dtype == mx.float32 for array in arrays)
    config = json.loads((DEMO_PATH / "config.json").read_text())
    assert config["max_position_embeddings"] >= 4096 + 256
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    generation = json.loads((DEMO_PATH / "generation_config.json").read_text())
    assert generation["do_sample"] is False
    assert generation["eos_token_id"] == config["eos_token_id"]


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two  spaces\n\n\ttabs ",
        "naïve café – ‘quotes’ “”",
        "日本語 привет 😀👩‍👩‍👧 \u200b\u0301",
        "it 's , . ! ? n't",
        "0123456789 1,234.5e-6",
        "\x00\x01\x7f",
        "",
    ],
)
def test_tokenizer_round_trip(loaded, text):
    _, tokenizer = loaded
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_digits_stay_single(loaded):
    _, tokenizer = loaded
    ids = tokenizer.encode("code 4821", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids[-4:]] == ["4", "8", "2", "1"]


def test_template_is_prefix_stable_over_a_conversation(loaded):
    _, tokenizer = loaded
    messages = [{"role": "system", "content": "The pin of the old lamp is 7302."}]
    turns = ["My name is Ada.", "What is my name?", "what is the pin of the old lamp?", "thanks"]
    answers = []
    known: list[int] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = render(tokenizer, messages, add_generation_prompt=True)
        assert prompt[: len(known)] == known
        said = reply_ids(loaded, prompt)
        assert said[-1] in tokenizer.eos_token_ids
        known = prompt + said
        answers.append(tokenizer.decode(said[:-1]))
        messages.append({"role": "assistant", "content": answers[-1]})
        assert render(tokenizer, messages) == known
    assert "Ada" in answers[1]
    assert "7302" in answers[2]


def test_template_takes_parts_and_other_roles(loaded):
    _, tokenizer = loaded
    plain = render(tokenizer, [{"role": "user", "content": "hello there"}])
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    assert render(tokenizer, [{"role": "user", "content": parts}]) == plain


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("hello", "Hello"),
        ("Who are you?", "vllm_metal_lite"),
        ("How do I run a real model?", "vllm-metal-lite chat mlx-community/Qwen3-0.6B-4bit"),
        ("repeat after me: apple plum pear", "apple plum pear"),
        ("reverse: apple plum pear", "pear plum apple"),
        ("sort: 5 3 9 1", "1 3 5 9"),
        ("What is 7 + 5?", "12"),
        ("Write a novel about the sea.", "tiny demo model"),
        ("What is my name?", "do not know"),
    ],
)
def test_small_talk_and_skills(loaded, said, expected):
    _, tokenizer = loaded
    prompt = render(tokenizer, [{"role": "user", "content": said}], add_generation_prompt=True)
    assert expected in tokenizer.decode(reply_ids(loaded, prompt))


@pytest.mark.long
def test_recall_at_256_tokens(loaded):
    tokenizer = Tokenizer.from_file(str(DEMO_PATH / "tokenizer.json"))
    for test in data.recall_prompts(tokenizer, 256, 6):
        messages = [{"role": role, "content": text} for role, text in test.messages]
        assert render(loaded[1], messages, add_generation_prompt=True) == test.prompt_ids
        text = tokenizer.decode(reply_ids(loaded, test.prompt_ids))
        assert recall.is_right(text, test.value)


@pytest.mark.thorough
def test_training_smoke(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--smoke", "--out", str(tmp_path)])
    train.main()
    model, tokenizer = load(str(tmp_path))
    assert tokenizer.encode("hello")
    assert model(mx.array([[1, 2, 3]])).shape[-1] > 300
