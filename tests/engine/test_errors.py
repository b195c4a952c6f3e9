"""Errors for a user: one line that names the value and the limit; no other request is harmed."""

import errno
import json
import re
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from tests.support.models import tiny_models as tiny
from vllm_metal_lite import LLM
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError, RequestError, SamplingError
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.generation_config import sampling_defaults
from vllm_metal_lite.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)

BAD_REQUESTS = {
    "empty prompt": (([], GREEDY), {}, ["empty"]),
    "longer than the context": (([1] * 65, GREEDY), {}, ["65", "64"]),
    "as long as the context": (([1] * 64, GREEDY), {}, ["64"]),
    "negative token": (([1, -1], GREEDY), {}, ["-1", "101"]),
    "token beyond the vocabulary": (([1, 101], GREEDY), {}, ["101"]),
    "token beyond int32": (([2**40], GREEDY), {}, [str(2**40), "101"]),
    "token that is no integer": (([1, 2.0], GREEDY), {}, ["2.0"]),
    "token that is a bool": (([True], GREEDY), {}, ["True"]),
    "token that is a string": (([1, "a"], GREEDY), {}, ["'a'"]),
    "a prompt of two dimensions": ((np.ones((2, 2), int), GREEDY), {}, ["integers"]),
    "no prompt": ((None, GREEDY), {}, ["a prompt must be", "None"]),
    "a dict without a prompt": (({"text": "x"}, GREEDY), {}, ["prompt"]),
    "text without a tokenizer": (("hello", GREEDY), {}, ["tokenizer"]),
    "a stop string without a tokenizer": (
        ([1], SamplingParams(stop="e")), {}, ["stop", "tokenizer"]),
    "parameters of another type": (
        ([1], {"temperature": 0}), {}, ["SamplingParams", "{'temperature': 0}"]),
    "bias beyond the vocabulary": (
        ([1], SamplingParams(logit_bias={101: 1.0})), {}, ["logit_bias", "101"]),
    "stop token beyond the vocabulary": (
        ([1], SamplingParams(stop_token_ids=[500])), {}, ["stop_token_ids", "500"]),
    "priority that is no number": (([1], GREEDY), {"priority": "high"}, ["priority", "'high'"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_others_go_on(fault):
    engine = tiny.engine(max_model_len=64, max_num_batched_tokens=32)
    prompt = tiny.prompts(1, 20, 20)[0]
    engine.add_request("good", prompt, GREEDY)
    engine.step()
    (bad, params), how, words = BAD_REQUESTS[fault]
    before = tiny.counts(engine)
    with pytest.raises((RequestError, SamplingError)) as error:
        engine.add_request("bad", bad, params, **how)
    message = str(error.value)
    assert "\n" not in message
    assert all(w in message for w in words), message
    assert tiny.counts(engine) == before
    done = tiny.run(engine)
    assert list(done) == ["good"]
    assert done["good"].outputs[0].token_ids == tiny.alone(tiny.native("llama"), prompt, 8)
    engine.add_request("bad", prompt, GREEDY)  # the id is still free
    assert tiny.run(engine)["bad"].finished


def test_request_ids_are_strings():
    engine = tiny.engine()
    for bad in (None, 3, ["a"]):
        with pytest.raises(RequestError, match="request_id"):
            engine.add_request(bad, [1], GREEDY)


def test_an_id_that_is_used_again_is_not_at_fault_for_the_step_of_an_aborted_prompt(caplog):
    engine = tiny.engine()
    prompts = tiny.prompts(2, 20, 20)
    engine.add_request("y", prompts[0], GREEDY)
    engine.step()
    engine.add_request("x", prompts[1], GREEDY)
    engine.step()
    (flying,) = engine.in_flight.outputs
    assert [s.request.request_id for s in flying.segments] == ["y", "x"]
    engine.abort("x")
    engine.add_request("x", prompts[1], GREEDY)

    def fail():
        raise RuntimeError("the forward failed")

    engine.pipeline.steps[0].wait = fail
    with pytest.raises(RuntimeError, match="the forward failed"):
        engine.step()
    assert engine.requests_at_fault == []
    assert caplog.messages == ["a step of the engine failed: the forward failed"]
    done = tiny.run(engine)
    for name, prompt in zip("yx", prompts, strict=True):
        assert done[name].outputs[0].token_ids == tiny.alone(tiny.native("llama"), prompt, 8)


# Model folders


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
BROKEN_FOLDERS = {
    "no config": lambda f: (f / "config.json").unlink(),
    "bad JSON": lambda f: (f / "config.json").write_text('{"model_type": "llama",'),
    "JSON that is a list": lambda f: (f / "config.json").write_text("[1]"),
    "config that is not text": lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00{"),
    "no model_type": lambda f: edit_config(f, model_type=...),
    "unknown model_type": lambda f: edit_config(f, model_type="no_such_model"),
    "an architecture that exits on import": lambda f: edit_config(f, model_type="olmo"),
    "a config without its sizes": lambda f: edit_config(f, hidden_size=...),
    "sizes that do not fit the weights": lambda f: edit_config(f, hidden_size=32),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "truncated weights": lambda f: truncate(f, "model.safetensors", 0.5),
    "truncated header": lambda f: truncate(f, "model.safetensors", 0.0001),
    "empty weights": lambda f: (f / "model.safetensors").write_bytes(b""),
    "weights that are text": lambda f: (f / "model.safetensors").write_text("version https://git-lfs"),
    "a weight missing": lambda f: edit_weights(f, lambda w: w.pop(KEY)),
    "a weight too many": lambda f: edit_weights(f, lambda w: w.update({"extra": mx.zeros(3)})),
    "a weight of another shape": lambda f: edit_weights(
        f, lambda w: w.update({KEY: mx.zeros((3, 3))})),
    "no tokenizer": lambda f: [p.unlink() for p in f.glob("tokenizer*")],
    "broken tokenizer": lambda f: truncate(f, "tokenizer.json", 0.5),
    "an architecture that is not trusted": lambda f: edit_config(f, model_type="plamo3"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN_FOLDERS)
def test_a_broken_model_folder_is_one_clear_line(folder, fault):
    BROKEN_FOLDERS[fault](folder)
    with pytest.raises(ModelLoadError) as error:
        LLM(str(folder), num_blocks=8)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    assert len(message) < 500


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
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 9\n"
    (folder / "model.safetensors").write_text(pointer)
    wanted = f"{folder}: model.safetensors is a git-lfs pointer .*`git lfs pull`"
    with pytest.raises(ModelLoadError, match=wanted):
        loader.load(str(folder))
    (folder / "tokenizer.json").write_text(pointer)
    with pytest.raises(ModelLoadError, match=r"\(so are 1 more\)") as error:
        loader.load(str(folder))
    assert "\n" not in str(error.value)


def test_a_missing_file_of_weights_is_named(folder):
    names = list(mx.load(str(folder / "model.safetensors")))
    file = "model-00002-of-00002.safetensors"
    shards = dict.fromkeys(names, "model.safetensors") | dict.fromkeys(names[:15], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    edit_weights(folder, lambda weights: [weights.pop(name) for name in names[:15]])
    words = f"1 of its 2 files of weights are missing, such as {file}"
    with pytest.raises(ModelLoadError, match=words):
        loader.load(str(folder))


def test_what_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, words in (
        (str(tmp_path / "file"), "this is a file"),
        (str(tmp_path / "nowhere"), "no such folder"),
        ("nowhere", "no such folder"),
        ("someone/some-model", "cannot be reached"),
        ("", "no config.json"),
    ):
        with pytest.raises(ModelLoadError, match=words) as error:
            loader.load(name)
        assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_listed_is_named(monkeypatch, folder):
    def fails(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fails)
    with pytest.raises(ModelLoadError, match=f"{folder}: .*Permission denied"):
        loader.load(str(folder))


def test_a_full_disk_is_no_missing_network(monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

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
