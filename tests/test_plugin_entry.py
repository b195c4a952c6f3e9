"""The entry point of the vLLM plugin, without vLLM."""

import importlib
import logging
import os
import platform
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.run_python import run_python
from vllm_metal_lite import vllm_plugin


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Makes a version of vLLM the one that Python's metadata knows."""

    def install(version: str) -> None:
        folder = tmp_path / f"vllm-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_the_package_and_the_entry_point_import_neither_torch_nor_vllm_nor_mlx():
    script = (
        "import sys, vllm_metal_lite\n"
        "from vllm_metal_lite.vllm_plugin import register\n"
        "register()\n"
        "print(sorted({'torch', 'vllm', 'mlx', 'mlx.core', 'numpy'} & set(sys.modules)))"
    )
    out = run_python("-c", script, env={**os.environ, "METAL_LITE_DEVICE": "cpu"})
    assert out.stdout.strip() == "[]", out.stderr


def test_the_entry_point_is_declared():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    entry = project["project"]["entry-points"]["vllm.platform_plugins"]["metal_lite"]
    module, name = entry.split(":")
    assert getattr(importlib.import_module(module), name) is vllm_plugin.register


@pytest.mark.parametrize(
    ("device", "system", "machine", "expected"),
    [
        (None, "linux", "x86_64", False),
        ("auto", "linux", "aarch64", False),
        ("cpu", "linux", "x86_64", True),
        ("cuda", "linux", "x86_64", True),
        (None, "darwin", "arm64", True),
        ("auto", "darwin", "arm64", True),
        (None, "darwin", "x86_64", False),
    ],
)
def test_platforms_on_which_the_plugin_is_active(monkeypatch, device, system, machine, expected):
    monkeypatch.delenv("METAL_LITE_DEVICE", raising=False)
    if device is not None:
        monkeypatch.setenv("METAL_LITE_DEVICE", device)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert vllm_plugin.wanted() == expected


def test_the_plugin_s_module_platform_does_not_hide_python_s(monkeypatch):
    """vLLM imports `vllm_plugin.platform`, and calls `register` again after that."""
    monkeypatch.delenv("METAL_LITE_DEVICE", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(vllm_plugin, "platform", vllm_plugin, raising=False)
    assert vllm_plugin.wanted()


def test_an_active_plugin_names_its_platform_and_respects_what_is_set(monkeypatch, installed):
    monkeypatch.setenv("METAL_LITE_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    installed("0.33.0")
    for _ in range(2):  # vLLM asks twice
        assert vllm_plugin.register().endswith(".MetalLitePlatform")
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_an_error_is_logged_and_disables_the_plugin(monkeypatch, caplog):
    monkeypatch.setenv("METAL_LITE_DEVICE", "metal")
    assert vllm_plugin.register() is None
    assert "METAL_LITE_DEVICE must be one of" in caplog.text


@pytest.mark.parametrize(
    ("found", "is_ok"),
    [
        *((found, True) for found in ("0.27.1", "0.33.0", "0.33.2+cpu", "0.30.0rc1")),
        *((found, False) for found in ("0.27.0", "0.34.0", "1.0", "0.26.9.dev1")),
    ],
)
def test_the_range_of_versions(found, is_ok):
    problem = vllm_plugin.version_problem(found)
    assert (problem is None) == is_ok
    assert is_ok or (found in problem and "0.27.1 to 0.33" in problem and "\n" not in problem)


def test_an_unknown_version_is_named_once_in_all_processes(monkeypatch, installed, caplog):
    """The processes that this one starts inherit its environment."""
    monkeypatch.setenv("METAL_LITE_DEVICE", "cpu")
    monkeypatch.setenv("METAL_LITE_WARNED", "")
    installed("0.34.0")
    for _ in range(4):
        assert vllm_plugin.register()
    assert caplog.text.count("vLLM 0.34.0 is outside of the range") == 1


def test_the_package_logs_through_vllm(monkeypatch):
    ours, theirs = logging.getLogger("vllm_metal_lite"), logging.getLogger("vllm")
    monkeypatch.setattr(ours, "parent", ours.parent)
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    monkeypatch.setattr(theirs, "handlers", [handler])
    for _ in range(2):  # vLLM may make a second worker in a process
        vllm_plugin.log_through_vllm()
    logging.getLogger("vllm_metal_lite.model.trial").warning("slow")
    logging.getLogger("vllm_metal_lite.checks").info("checking")
    assert seen == ["slow", "checking"]
