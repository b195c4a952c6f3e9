"""The command `cache`."""

import errno
from unittest.mock import Mock

import pytest

from vllm_metal_lite import envs
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.prefix_disk.folder import Folder

KEYS = [bytes([number]) * 16 for number in range(3)]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Folder(envs.prefix_folder(), 1 << 30, "the-model")
    folder.free_margin = 0
    folder.write(KEYS, [(key, bytes(1 << 20)) for key in KEYS])
    return folder


def test_list(folder, capsys):
    assert main(["cache"]) == 0
    (model, total) = capsys.readouterr().out.splitlines()
    assert model.split() == ["3.0", "MiB", "3", "files", "the-model"]
    assert str(folder.path) in total


def test_verify_drops_bad_files(folder, capsys):
    assert main(["cache", "verify"]) == 0
    folder.path_of(KEYS[1]).write_bytes(b"bad")
    assert main(["cache", "verify"]) == 1
    assert "good: 2, bad: 1" in capsys.readouterr().out
    assert not folder.path_of(KEYS[1]).exists()


def test_clear(folder, capsys):
    assert main(["cache", "clear"]) == 0
    assert not folder.models()
    assert not folder.path_of(KEYS[0]).exists()


def test_without_a_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["cache"]) == 0
    assert "no prefixes are kept" in capsys.readouterr().out
    assert not envs.prefix_folder().exists()


def test_an_error_of_the_folder_is_one_line(folder, monkeypatch, capfd):
    error = PermissionError(errno.EACCES, "refused", "x")
    monkeypatch.setattr(Folder, "models", Mock(side_effect=error))
    assert main(["cache"]) == 1
    assert capfd.readouterr().err == "error: x: refused\n"
