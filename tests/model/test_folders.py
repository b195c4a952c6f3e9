"""A fault of a model folder is one line, both when the model is loaded and when it is listed."""

import errno
import json
import re
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest

from tests.support.models import tiny_models as tiny
from vllm_metal_lite import LLM
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.models import describe, find_models, table
from vllm_metal_lite.cli.options import flag
from vllm_metal_lite.errors import ModelLoadError, RequestError, SamplingError
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.files.checkpoint import sampling_defaults
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("good") / "tiny")


@pytest.fixture
def folder(good_folder, tmp_path):
    for file in good_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_config(folder, **changes):
    tiny.edit(folder / "config.json", **changes)


def edit_weights(folder, change):
    path = str(folder / "model.safetensors")
    weights = {k: mx.array(np.array(v)) for k, v in mx.load(path).items()}
    change(weights)
    mx.save_safetensors(path, weights, {"format": "mlx"})


def truncate(folder, name, keep):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * keep)])


KEY = "model.layers.0.self_attn.q_proj.weight"
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 9\n"
SHARDS = {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
# The damage, and the reason.
BROKEN = {
    "no config": (lambda f: (f / CONFIG).unlink(), ""),
    "bad JSON": (lambda f: (f / CONFIG).write_text('{"model_type": "lla'), "not readable as JSON"),
    "JSON that is a list": (lambda f: (f / CONFIG).write_text("[1]"), "must be a JSON object"),
    "config that is not text": (
        lambda f: (f / CONFIG).write_bytes(b"\xff\xfe\x00{"), "not readable as JSON"),
    "no model_type": (lambda f: edit_config(f, model_type=...), "config.json has no model_type"),
    "unknown model_type": (
        lambda f: edit_config(f, model_type="nothing"), "Model type nothing not supported"),
    "an architecture that exits on import": (
        lambda f: edit_config(f, model_type="olmo"), "its code ends the process (1)"),
    "an architecture that is not trusted": (
        lambda f: edit_config(f, model_type="plamo3"), "plamo3 is not supported: its decoding"),
    "code of its own": (
        lambda f: edit_config(f, model_file="x.py"), "set --trust-remote-code to run it"),
    "a config without its sizes": (
        lambda f: edit_config(f, hidden_size=...), "required positional argument: 'hidden_size'"),
    "sizes that do not fit the weights": (
        lambda f: edit_config(f, hidden_size=32), "Expected shape (101, 32) but received shape"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no model*.safetensors"),
    "truncated weights": (lambda f: truncate(f, WEIGHTS, 0.5), "an incomplete download"),
    "truncated header": (lambda f: truncate(f, WEIGHTS, 0.0001), "an incomplete download"),
    "empty weights": (lambda f: (f / WEIGHTS).write_bytes(b""), ""),
    "weights that are garbage": (lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 100), ""),
    "a pointer": (lambda f: (f / WEIGHTS).write_text(POINTER), "is a git-lfs pointer"),
    "a weight missing": (lambda f: edit_weights(f, lambda w: w.pop(KEY)), "parameters"),
    "a weight too many": (
        lambda f: edit_weights(f, lambda w: w.update({"extra": mx.zeros(3)})), "parameters"),
    "a weight of another shape": (
        lambda f: edit_weights(f, lambda w: w.update({KEY: mx.zeros((3, 3))})), "shape"),
    "other weights": (
        lambda f: mx.save_safetensors(str(f / WEIGHTS), {"x": mx.zeros(3)}), "parameters"),
    "a file of weights missing": (
        lambda f: (f / INDEX).write_text(json.dumps(SHARDS)),
        "1 of its 2 files of weights are missing, such as model-00002-of-00002.safetensors"),
    "an odd index": (lambda f: (f / INDEX).write_text("[]"), f"{INDEX}: not readable"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "..."),
    "no tokenizer but its class": (
        lambda f: (f / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
        and (f / "tokenizer.json").unlink(), "it has no tokenizer files"),
    "broken tokenizer": (
        lambda f: truncate(f, "tokenizer.json", 0.5), "Failed to parse tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_folder_is_one_clear_line_for_who_loads_it_and_who_lists_it(folder, fault):
    damage, reason = BROKEN[fault]
    damage(folder)
    with pytest.raises(ModelLoadError) as error:
        LLM(str(folder), num_blocks=8)
    message = error.value.spelled(flag)
    assert message.isprintable()
    assert str(folder) in message
    assert reason in message
    assert len(message) < 500
    [listed] = [e for e in map(describe, find_models([folder])) if e["name"] == str(folder)]
    assert not listed["supported"]
    assert listed["problem"].isprintable()
    assert reason in listed["problem"]
    assert not listed["problem"].startswith(str(folder))
    assert folder.name in "\n".join(table([listed]))


BAD_GENERATION_CONFIGS = {
    "not JSON": ("{", "not readable as JSON: Expecting property name"),
    "not an object": ("[1]", "must be a JSON object"),
    "no text": (b"\xff\xfe\x00{", "not readable as JSON: 'utf-8' codec"),
    "a number out of range": ('{"temperature": -3, "top_k": 5}', "temperature must be .*, got -3"),
    "a value of another type": ('{"top_p": "high", "top_k": 5}', "top_p must be .*, got 'high'"),
}


@pytest.mark.parametrize("fault", BAD_GENERATION_CONFIGS)
def test_what_is_bad_in_a_generation_config_is_ignored_with_a_line(tmp_path, caplog, fault):
    text, why = BAD_GENERATION_CONFIGS[fault]
    path = tmp_path / "generation_config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert sampling_defaults(tmp_path) == ({"top_k": 5} if "top_k" in str(text) else {})
    (line,) = caplog.messages
    assert re.fullmatch(f"{path}: {why}.* ignored", line)


def test_a_model_with_a_broken_generation_config_answers(folder):
    (folder / "generation_config.json").write_text("{")
    assert LLM(str(folder), num_blocks=8).generate("fine", GREEDY)[0].finished


def test_an_end_outside_the_vocabulary_is_named(folder, caplog):
    edit_config(folder, eos_token_id=5000)
    tiny.edit(folder / "tokenizer_config.json", eos_token=...)
    llm = LLM(str(folder), num_blocks=8)
    assert f"{folder}: eos_token_id 5000 is outside the vocabulary of 101: ignored" in caplog.text
    assert len(llm.generate("fine", GREEDY)[0].outputs[0].token_ids) == 8
    yes = SamplingParams(structured_outputs={"choice": ["yes"]})
    with pytest.raises(SamplingError, match=r"no eos_token_id in its vocabulary of 101"):
        llm.generate("fine", yes)


def test_a_clone_without_its_large_files_says_how_to_get_them(folder):
    (folder / WEIGHTS).write_text(POINTER)
    wanted = f"{folder}: model.safetensors is a git-lfs pointer .*`git lfs pull`"
    with pytest.raises(ModelLoadError, match=wanted):
        loader.load(str(folder))
    (folder / "tokenizer.json").write_text(POINTER)
    with pytest.raises(ModelLoadError, match=r"\(so are 1 more\)") as error:
        loader.load(str(folder))
    assert "\n" not in str(error.value)


def test_what_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, words in (
        (str(tmp_path / "file"), "this is a file"),
        (str(tmp_path), "not a model folder: it has no config.json"),
        (str(tmp_path / "nowhere"), "no such folder"),
        ("nowhere", "no such folder"),
        ("someone/some-model", "cannot be reached"),
        ("", "a model is 'demo', a local folder, .*, got ''"),
    ):
        with pytest.raises(ModelLoadError, match=words) as error:
            loader.load(name)
        assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_listed_is_named(monkeypatch, folder):
    fails = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(Path, "iterdir", fails)
    with pytest.raises(ModelLoadError, match=f"{folder}: .*Permission denied"):
        loader.load(str(folder))


def test_a_full_disk_is_no_missing_network(monkeypatch):
    fails = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(ModelLoadError, match=r"some-model: cannot be downloaded: .*No space left"):
        loader.load("someone/some-model")


@pytest.mark.parametrize(("config", "words"), [
    ({"quantization_config": []}, "config.json: quantization_config must be an object"),
    ({"quantization": "q4"}, "config.json: quantization must be an object, got 'q4'"),
    ({"quantization_config": {"bits": 4}}, "cannot load this model: no key 'quant_method'"),
])  # fmt: skip
def test_a_quantisation_that_does_not_fit_is_named_by_its_key(folder, config, words):
    edit_config(folder, **config)
    with pytest.raises(ModelLoadError, match=f"{folder}: {words}"):
        loader.load(str(folder))


# Files whose names or parts differ from mlx-lm's in a plain way


def rewrite(folder: Path, name: str, change, **config):
    """A new folder of an architecture, its weights changed."""
    tiny.write_folder(folder, name, **config)
    edit_weights(folder, change)
    return str(folder)


def bare(weights):
    """The names of a base model's file, as of Qwen3-Embedding."""
    for name in [name for name in weights if name.startswith("model.")]:
        weights[name.removeprefix("model.")] = weights.pop(name)


def bare_without_head(weights):
    bare(weights)
    del weights["lm_head.weight"]


def for_embeddings(folder: Path) -> None:
    module = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "x.models.Pooling"}
    (folder / "modules.json").write_text(json.dumps([module]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3_text"])
def test_names_of_a_base_model_s_file_are_read(tmp_path, name, tied):
    tied = tied or name == "gemma3_text"
    path = rewrite(tmp_path, name, bare, tie_word_embeddings=tied)
    expected = tiny.write_folder(tmp_path / "expected", name, tie_word_embeddings=tied)
    answers = [
        LLM(p, num_blocks=8).generate("fine", GREEDY)[0].outputs[0].token_ids
        for p in (path, str(expected))
    ]
    assert answers[0] == answers[1]
    [listed] = [e for e in map(describe, find_models([tmp_path])) if e["name"] == path]
    assert listed["supported"]


def test_a_model_for_embeddings_needs_no_head_and_gives_no_answers(tmp_path):
    path = rewrite(tmp_path, "qwen3", bare_without_head, tie_word_embeddings=False)
    with pytest.raises(ModelLoadError, match="not in model"):  # an answer's head may be lost
        loader.load(path)
    for_embeddings(tmp_path)
    whole = tiny.write_folder(tmp_path / "whole", "qwen3", tie_word_embeddings=False)
    llm, expected = LLM(path, num_blocks=8), LLM(str(whole), num_blocks=8)
    assert llm.embed("fine")[0].embedding == expected.embed("fine")[0].embedding
    why = f"{path} gives no answers: its files have no lm_head.weight: it is for embeddings"
    with pytest.raises(RequestError, match=re.escape(why)):
        llm.generate("fine", GREEDY)
    with pytest.raises(RequestError, match=re.escape(why)):
        llm.embed("fine", pooling_params=PoolingParams(score_token_ids=[1, 2]))


@pytest.mark.parametrize("name", ["lfm2", "gemma4_text", "mamba", "minicpm", "hunyuan", "nemotron"])
def test_a_tied_head_in_the_file_is_read_if_it_is_the_embedding(tmp_path, name):
    def add_head(weights):
        [embedding] = [n for n in weights if re.search(r"embed(_tokens|dings)\.weight$", n)]
        weights["lm_head.weight"] = mx.array(weights[embedding])

    path = rewrite(tmp_path, name, add_head, tie_word_embeddings=True)
    loader.load(path)
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": mx.zeros((101, 64))}))
    with pytest.raises(ModelLoadError, match=r"not in model: lm_head\.weight"):
        loader.load(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda w: w.pop("norm.weight"),
        lambda w: w.update({"layers.0.bonus": mx.zeros(3)}),
        lambda w: w.update({"tower.weight": mx.zeros(3)}),
        lambda w: w.update({"norm.weight": mx.zeros(3)}),
    ],
)
def test_all_else_stays_an_error(tmp_path, damage):
    path = rewrite(tmp_path, "qwen3", bare, tie_word_embeddings=True)
    for_embeddings(tmp_path)
    edit_weights(tmp_path, damage)
    with pytest.raises(ModelLoadError, match="cannot load this model"):
        loader.load(path)
