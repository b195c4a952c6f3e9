"""`vllm-metal-lite models`: found, described and printed, without their weights."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.support.models import tiny_models
from vllm_metal_lite import EngineConfig, LLMEngine
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.cli.models import describe, find_models, table
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model.loader import load, preview
from vllm_metal_lite.runner.step_peak import estimated_step_peak, step_peak_bytes

# One of each way to run.
_RUNS = dict.fromkeys(("llama", "gemma3_text", "deepseek_v3", "qwen3_next"), "packed")
_RUNS |= {"mamba": "in sequences", "baichuan_m1": "by segment"}


@pytest.fixture(autouse=True)
def no_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Tiny models, in folders a level or two below; not to be changed."""
    root = tmp_path_factory.mktemp("models")
    for name in _RUNS:
        tiny_models.write_folder(root / "tiny" / name, name)
    tiny_models.write_folder(root / "llama-q4", "llama/q4")
    return root


def entries(*folders: Path) -> dict[str, SimpleNamespace]:
    """By the last part of the name."""
    found = [SimpleNamespace(**describe(entry)) for entry in find_models(folders)]
    return {e.name if e.source == "hub" else Path(e.name).name: e for e in found}


def add_to_hub(hub: Path, repo: str, folder: Path | None, revision: str = "a" * 40) -> Path:
    """A repository in the layout of the cache: links in a snapshot to files in blobs."""
    path = hub / f"models--{repo.replace('/', '--')}"
    for part in ("blobs", "refs", f"snapshots/{revision}"):
        (path / part).mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir() if folder else ():
        blob = path / "blobs" / f"{revision[0]}-{file.name}"
        shutil.copy(file, blob)
        (path / "snapshots" / revision / file.name).symlink_to(blob)
    (path / "refs" / "main").write_text(revision)
    return path


@pytest.mark.long
def test_each_way_to_run_is_known_before_loading(folders):
    found = entries(folders)
    assert set(found) == {*_RUNS, "demo", "llama-q4"}
    for name, runs in _RUNS.items():
        entry = found[name]
        assert entry.supported, entry.problem
        assert entry.runs == runs
        loaded = load(entry.name)
        assert entry.context == loaded.max_position
        assert entry.weight_bytes == loaded.weight_bytes
        assert entry.kv_bytes_per_token == loaded.kv_bytes_per_token
        assert entry.state_bytes == loaded.state_bytes


def test_no_weight_is_read(folders, tmp_path):
    """The weights of this file are noise that no other file has, and 16 MiB large."""
    path = tmp_path / "large"
    shutil.copytree(folders / "tiny" / "llama", path)
    weights = mx.load(str(path / "model.safetensors"))
    config = json.loads((path / "config.json").read_text())
    rows = 65536
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = mx.zeros((rows, config["hidden_size"]))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    del weights
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = preview(path, "large")
    assert model.weight_bytes > 2 * rows * config["hidden_size"] * 4
    assert mx.get_peak_memory() - before < 1 << 20


def test_size_and_bits(folders):
    found = entries(folders)
    plain, quantised = found["llama"], found["llama-q4"]
    assert plain.bits == [32]
    assert quantised.bits == [4]
    assert quantised.quantization["group_size"] == 32
    files = (folders / "llama-q4").iterdir()
    assert quantised.size_bytes == sum(file.stat().st_size for file in files)
    assert quantised.size_bytes < plain.size_bytes


def test_the_context_that_fits_is_an_engines(folders):
    path = folders / "tiny" / "llama"
    entry = entries(path)["llama"]
    engine = LLMEngine.from_name(str(path))
    assert entry.max_model_len == engine.max_model_len
    assert entry.num_tokens == engine.kv_groups[0].num_blocks * engine.config.block_size


def test_a_model_that_does_not_fit(folders, monkeypatch):
    monkeypatch.setattr("vllm_metal_lite.backend.memory_limit", lambda: 1 << 20)
    entry = entries(folders / "tiny" / "llama")["llama"]
    assert entry.supported
    assert (entry.num_tokens, entry.max_model_len) == (0, 0)
    assert entry.memory_problem.startswith("weights ")
    assert "--memory-fraction" in entry.memory_problem
    text = "\n".join(table([vars(entry)]))
    assert "do not fit:" in text


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v3"])
def test_the_estimate_of_a_step_is_near_the_measurement(folders, name):
    """Within a factor of 3: other terms matter for models as small as these."""
    path, config = folders / "tiny" / name, EngineConfig()
    estimate = estimated_step_peak(preview(path, name), config, 512)
    measured = step_peak_bytes(load(str(path)), config, 512)
    assert measured / 3 < estimate < measured * 3


def test_what_is_no_model(tmp_path):
    other = tmp_path / "website"
    other.mkdir()
    (other / "config.json").write_text("{}")
    deep = tmp_path / "a" / "b" / "c" / "d"
    tiny_models.write_folder(deep, "llama")
    assert set(entries(tmp_path)) == {"demo", tmp_path.name}
    assert entries(tmp_path)[tmp_path.name].problem.startswith("no model in it")
    assert entries(tmp_path / "a")["d"].supported


def test_the_hub_cache(folders, tmp_path):
    hub, llama = tmp_path / "hub", folders / "tiny" / "llama"
    add_to_hub(hub, "acme/Tiny-4bit", folders / "llama-q4")
    path = add_to_hub(hub, "acme/two", llama, "b" * 40)
    add_to_hub(hub, "acme/two", folders / "tiny" / "mamba", "c" * 40)  # refs/main names this
    add_to_hub(hub, "acme/nothing", None)
    (hub / "models--acme--corrupt").mkdir()
    found = entries()
    tiny, two = found["acme/Tiny-4bit"], found["acme/two"]
    assert tiny.supported
    assert tiny.source == "hub"
    assert tiny.size_bytes == sum(f.stat().st_size for f in (folders / "llama-q4").iterdir())
    assert two.model_type == "mamba"
    assert two.path == str((path / "snapshots" / ("c" * 40)).resolve())
    assert "no config.json" in found["acme/nothing"].problem
    assert found["acme/corrupt"].problem == "not in the local cache"


def tree(repo: Path, *files: str) -> None:
    """The hub client's list of what the repository has."""
    known = {file: {"size": 1, "blob_id": "0"} for file in files}
    (repo / "trees").mkdir()
    text = json.dumps({"format_version": 1, "files": known})
    (repo / "trees" / f"{'a' * 40}.json").write_text(text)


def lost(name: str):
    """The link stays, the file is gone."""
    return lambda repo: next(repo.glob(f"snapshots/*/{name}")).resolve().unlink()


CACHES = {
    "whole": (lambda repo: tree(repo, "config.json", "tokenizer.json"), None),
    "no branch": (lambda repo: (repo / "refs" / "main").unlink(), None),
    "another branch": (lambda repo: (repo / "refs" / "main").write_text("f" * 40), None),
    "texts and code": (lambda repo: tree(repo, "config.json", "LICENSE.txt", "code.py"), None),
    "a file": (lambda repo: tree(repo, "special.json"), "1 file(s) are missing (special.json)"),
    "no file": (lambda repo: shutil.rmtree(repo / "snapshots"), "not in the local cache"),
    "lost config": (lost("config.json"), "config.json is a link to a file that is gone"),
    "lost weights": (lost("model.safetensors"), "model.safetensors is a link to a file that"),
    "lost tokenizer": (lost("tokenizer.json"), "tokenizer.json is a link to a file that is gone"),
    "lost text": (lost("README.md"), None),
}


@pytest.mark.parametrize("state", CACHES)
def test_what_the_list_says_of_a_cached_model_loading_says_too(folders, tmp_path, state):
    damage, problem = CACHES[state]
    whole = shutil.copytree(folders / "tiny" / "llama", tmp_path / "whole")
    (whole / "README.md").write_text("About it.")
    damage(add_to_hub(tmp_path / "hub", "acme/llama", whole))
    entry = entries()["acme/llama"]
    assert entry.supported == (problem is None)
    if problem is None:
        assert load("acme/llama").name == "acme/llama"
        return
    assert problem in entry.problem
    with pytest.raises(ModelLoadError) as refusal:
        load("acme/llama")
    assert str(refusal.value).startswith(f"acme/llama: {entry.problem}")
    assert str(tmp_path) not in str(refusal.value)


def test_a_folder_that_is_given_twice_is_listed_once(folders):
    path = folders / "tiny"
    names = [found["name"] for found in find_models([path, path / "llama", path])]
    assert len(names) == len(set(names)) == 1 + len(_RUNS)


def test_json_is_complete_and_alone_on_stdout(folders, capsys):
    assert main(["models", "--json", str(folders)]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["memory_bytes"] > 0
    models = {Path(model["name"]).name: model for model in report["models"]}
    assert set(models) == {*_RUNS, "demo", "llama-q4"}
    assert models["mamba"]["runs"] == "in sequences"
    assert models["mamba"]["runs_reason"]
    assert models["demo"]["source"] == "demo"


def test_the_table(folders, capsys):
    assert main(["models", str(folders)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == ["name", "type", "size", "bits", "context", "runs", "cache", "fits"]
    (quantised,) = [line for line in lines if "llama-q4" in line]
    cells = re.split("  +", quantised)
    assert (cells[1], cells[3], cells[5], cells[6]) == ("llama", "4", "packed", "yes")
    assert captured.err == ""


def test_names_cannot_control_the_terminal(folders):
    odd = "a\x1b[2Jb\udcff"
    (entry,) = (e for e in find_models([folders / "llama-q4"]) if e["source"] == "folder")
    entry = {**describe(entry), "name": odd, "model_type": odd}
    text = "".join(table([entry, {**entry, "supported": False, "problem": odd}]))
    assert text.count("a�[2Jb�") == 5
    assert text.isprintable()
