"""The files of a release beside the wheel: a Homebrew formula, and files that start the server."""

import plistlib
import re
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tools.release import formula
from vllm_metal_lite import MetalLiteError

FOLDER = Path(formula.__file__).parent
PROJECT = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]


def report(*left_out: str) -> dict:
    """pip's report of an installation for a Mac: each direct dependency, without what it needs."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["serve"], *extras["structured"], *extras["images"]]
    names = {re.match(r"[\w-]+", text)[0] for text in wanted if "linux" not in text}
    requires = [*PROJECT["dependencies"]]
    for extra in formula._EXTRAS:
        requires += [f"{text}; extra == '{extra}'" for text in extras[extra]]
    install = [
        {
            "metadata": {"name": name},
            "download_info": {
                "url": f"https://files.example/{name}-1-py3-none-any.whl",
                "archive_info": {"hashes": {"sha256": "0" * 64}},
            },
        }
        for name in sorted({*names, "hatchling"} - {*left_out, "vllm-metal-lite"})
    ]
    own = {"metadata": {"name": "vllm-metal-lite", "requires_dist": requires}}
    return {"install": [own, *install]}


@pytest.fixture
def sdist(tmp_path):
    path = tmp_path / "vllm_metal_lite-1.tar.gz"
    path.write_bytes(b"abc")
    return path


def test_the_formula_has_every_dependency_and_every_hash(sdist, tmp_path):
    text = formula.formula(sdist, report(), "https://example.org/sdist", "https://example.org")
    assert 'url "https://example.org/sdist"\n  sha256 "ba7816bf8f01cfea414140de5dae2223' in text
    assert not re.search("@[A-Z]", text)
    resources = re.findall(r'resource "([\w-]+)" do\n    url "(\S+)"\n    sha256 "0{64}"', text)
    names = [name for name, _ in resources]
    assert names == sorted(names)
    assert {"mlx", "mlx-lm", "starlette", "llguidance", "pillow", "hatchling"} <= {*names}
    if brew := shutil.which("brew"):
        path = tmp_path / "vllm-metal-lite.rb"
        path.write_text(text)
        subprocess.run([brew, "style", path], check=True)


@pytest.mark.parametrize("name", ["mlx", "uvicorn", "pillow", "hatchling"])
def test_a_report_that_lacks_a_package_is_refused(sdist, name):
    with pytest.raises(MetalLiteError, match=f"the report lacks {name}: make it on a Mac"):
        formula.formula(sdist, report(name), "u", "h")


def test_a_package_without_a_wheel_or_a_hash_is_refused(sdist):
    for change in {"url": "https://files.example/mlx.tar.gz"}, {"archive_info": {}}:
        found = report()
        next(e for e in found["install"] if e["metadata"]["name"] == "mlx")["download_info"] |= (
            change
        )
        with pytest.raises(MetalLiteError, match=r"mlx: .* is no wheel with a sha256"):
            formula.formula(sdist, found, "u", "h")


def commands(name: str) -> list[str]:
    return plistlib.loads((FOLDER / name).read_bytes())["ProgramArguments"]


def test_the_log_of_the_launchd_agent_is_cut_while_it_is_written(tmp_path):
    """The agents' own commands, with a program that writes without end."""
    program = tmp_path / ".local/bin/vllm-metal-lite"
    logs = tmp_path / "Library/Logs"
    program.parent.mkdir(parents=True)
    logs.mkdir(parents=True)
    program.write_text(
        '#!/bin/sh\necho "$*"\nwhile :; do head -c 65536 /dev/zero; sleep 0.01; done\n'
    )
    program.chmod(0o755)
    log, old, env = (
        logs / "vllm-metal-lite.log",
        logs / "vllm-metal-lite.log.1",
        {"HOME": str(tmp_path)},
    )
    env["PATH"] = "/usr/bin:/bin"
    server = subprocess.Popen(commands("vllm-metal-lite.plist"), env=env)
    try:

        def cut() -> None:
            subprocess.run(commands("vllm-metal-lite-log.plist"), env=env, check=True)

        deadline = time.monotonic() + 600
        while not log.exists() or log.stat().st_size < 1 << 20:
            assert time.monotonic() < deadline
        cut()
        assert not old.exists()  # it is small
        while not old.exists():
            assert time.monotonic() < deadline
            cut()
    finally:
        server.kill()
        server.wait()
    assert old.read_bytes().startswith(b"serve --idle-unload 30\n")
    assert old.stat().st_size > 10 << 20
    assert not log.read_bytes().startswith(b"serve")
    assert log.stat().st_size < old.stat().st_size


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    unit = (FOLDER / "vllm-metal-lite.service").read_text()
    (tmp_path / "vllm-metal-lite.service").write_text(unit.replace("%h/.local/bin/", "/bin/true "))
    command = ["systemd-analyze", "verify", str(tmp_path / "vllm-metal-lite.service")]
    done = subprocess.run(command, capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "vllm-metal-lite" in line]
    assert not ours


def test_no_folder_of_tools_hides_an_installed_package():
    """A script of tools/ has the folder in front of `sys.path`."""
    folders = {path.name for path in FOLDER.parent.iterdir() if path.is_dir()}
    hidden = folders & {*sys.stdlib_module_names, *packages_distributions()}
    assert not hidden, hidden
