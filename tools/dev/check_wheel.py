"""Check the wheel: its content, and that it runs from an empty virtual environment.

    python -m tools.dev.check_wheel [WHEEL]      (default: build one from this checkout)

The wheel must hold the package, the kernels and the licence, and nothing else: no tests, no tools,
and not metal/host and metal/cuda, which execute kernels for developers.  The wheel is then
installed with its dependencies, and `chat` and `doctor` run from a folder outside the checkout;
then with the extra `serve`, and a server answers one chat and gives its page.  `pipx install` and
`uv tool install` then make the command, each in folders of its own.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import httpx

from tools.lib.frame import parser_of, run_main
from tools.lib.servers import server
from vllm_metal_lite import MetalLiteError

ROOT = Path(__file__).resolve().parents[2]
_METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}

_PLACES = ("PIPX", "HOME"), ("UV_TOOL", "DIR")

# `doctor` reads no kernel where there is no GPU.
_READ_KERNELS = """
from vllm_metal_lite.kernels import source
names = [file.stem for file in source.FOLDER.glob("*.metal")]
for name in names:
    source.read(name)
print(len(names), "kernels read from", source.FOLDER)
"""


def expected_content() -> set[str]:
    """The files that the wheel should hold, apart from its metadata."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output([*command, "vllm_metal_lite", "metal"], cwd=ROOT, text=True)
    files = {name for name in listed.splitlines() if (ROOT / name).is_file()}
    kernels = {name for name in files if name.startswith("metal/")}
    shipped = {name for name in kernels if not name.startswith(("metal/host/", "metal/cuda/"))}
    return files - kernels | {f"vllm_metal_lite/{name}" for name in shipped}


def check_content(wheel: Path) -> None:
    """Compare the content of the wheel with the checkout."""
    with ZipFile(wheel) as archive:
        content = {i.filename for i in archive.infolist() if not i.is_dir()}
    name, version = wheel.name.split("-")[:2]
    metadata = {f"{name}-{version}.dist-info/{file}" for file in _METADATA}
    expected = expected_content() | metadata
    if extra := sorted(content - expected):
        raise MetalLiteError(f"{wheel.name} holds what it should not: {', '.join(extra)}")
    if missing := sorted(expected - content):
        raise MetalLiteError(f"{wheel.name} lacks {', '.join(missing)}")
    print(f"{wheel.name}: {len(content)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def check_run(wheel: Path, folder: Path) -> None:
    """Install the wheel into a new virtual environment in `folder`, and use it from there."""
    home = folder / "venv"
    venv.create(home, with_pip=True)
    python, command = str(home / "bin" / "python"), str(home / "bin" / "vllm-metal-lite")
    print("Installing it with its dependencies ...", flush=True)
    _run([*_pip(python), "install", "-q", "--no-compile", str(wheel)], folder)
    version = wheel.name.split("-")[1]
    if (found := _run([command, "--version"], folder)) != f"vllm-metal-lite {version}":
        raise MetalLiteError(f"--version prints {found!r}, the wheel is {version}")
    print(_run([python, "-c", _READ_KERNELS], folder))
    print(_run([command, "doctor"], folder))
    answer = _run([command, "chat"], folder, "hello\n")
    if not answer:
        raise MetalLiteError("chat prints no answer")
    print(f"hello -> {answer}")
    refused = _run([command, "serve"], folder, fails=True)
    if ".[serve]" not in refused:
        raise MetalLiteError(f"without its extra, serve says {refused!r}")
    install = [*_pip(python), "install", "-q", "--no-compile"]
    _run([*install, f"vllm-metal-lite[serve] @ {wheel.resolve().as_uri()}"], folder)
    check_server(command, folder)


def check_server(command: str, folder: Path) -> None:
    """Start the server, and ask for an answer and for the page."""
    words, how = [command, "serve", "--port", "PORT"], {"cwd": folder, "env": _environment()}
    with (
        server(words, folder / "log", **how) as (url, _),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
    ):
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
        reply = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        answer, page = reply["choices"][0]["message"]["content"], http.get("/").content
    if not answer or b"<html" not in page:
        raise MetalLiteError(f"the server answers {answer!r}, its page has {len(page)} bytes")
    print(f"served: hello -> {answer}")


def check_installers(wheel: Path, folder: Path) -> None:
    """Install the wheel with pipx and with uv.  An installer that pip cannot get is skipped."""
    python = folder / "venv" / "bin" / "python"
    for words in ["pipx", "install"], ["uv", "tool", "install"]:
        name, home = words[0], folder / words[0]
        try:
            _run([*_pip(str(python)), "install", "-q", "--no-compile", name], folder)
        except MetalLiteError as e:
            print(f"skipped: {name} cannot be installed here: {e}")
            continue
        places = {f"{tool}_{place}": str(home) for tool, place in _PLACES}
        places |= {f"{tool}_BIN_DIR": str(home / "bin") for tool in ("PIPX", "UV_TOOL")}
        installer, package = str(python.with_name(name)), f"{wheel.resolve()}[serve]"
        _run([installer, *words[1:], "--python", sys.executable, package], folder, more=places)
        command = str(home / "bin" / "vllm-metal-lite")
        print(f"{' '.join(words)}: {_run([command, '--version'], folder)}")


def _environment() -> dict[str, str]:
    """This environment without Python's variables, and without the Hugging Face Hub."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return {**environment, "HF_HUB_OFFLINE": "1"}


def _run(
    command: list[str], folder: Path, stdin: str = "", fails: bool = False, more: Any = None
) -> str:
    """Run a command in `folder`; returns its output, or its errors if it should fail.

    more: further variables of its environment.
    """
    environment = {**_environment(), **(more or {})}
    how = {"cwd": folder, "env": environment, "input": stdin, "text": True}
    errors = subprocess.PIPE if fails else None
    done = subprocess.run(command, **how, stdout=subprocess.PIPE, stderr=errors)
    if fails and done.returncode:
        return done.stderr
    if done.returncode or fails:
        shown = " ".join([Path(command[0]).name, *command[1:]])
        raise MetalLiteError(f"exit code {done.returncode} from `{shown}`: {done.stdout.strip()}")
    return done.stdout.strip()


def build(folder: Path) -> Path:
    """Build the wheel of this checkout in `folder`."""
    words = [*_pip(sys.executable), "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    _run(words, folder)
    return next(folder.glob("*.whl"))


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check"]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("wheel", type=Path, nargs="?")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="vllm-metal-lite-wheel-") as temporary:
        folder = Path(temporary)
        wheel = args.wheel.resolve() if args.wheel else build(folder)
        check_content(wheel)
        check_run(wheel, folder)
        check_installers(wheel, folder)
    return 0


if __name__ == "__main__":
    run_main(main)
