"""`vllm-metal-lite serve`: its flags, and what the command prints."""

import signal

import httpx
import pytest

from tests.support.run_python import run_python
from tests.support.server.cli_kit import SAFETY
from tests.support.server.command import eventually, serve_command
from vllm_metal_lite.cli.commands import make_parser
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.cli.options import engine_config, serve_flags
from vllm_metal_lite.errors import install

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def test_a_key_from_the_environment_is_checked_too(monkeypatch, capsys):
    monkeypatch.setenv("METAL_LITE_API_KEY", "schlüssel")
    assert main(["serve"]) == 2
    err = capsys.readouterr().err
    assert "--api-key must be ASCII" in err
    assert "schlüssel" not in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory-budget-gib", "99999"], "error: --memory-budget-gib is 99999.0 GiB; this "),
        (["--memory-budget-gib", "0.001"], " or raise --memory-budget-gib\n"),
        ([""], "got ''"),  # an empty name is not the demo
    ],
)
def test_a_start_that_fails_says_why_once(capsys, flags, words):
    assert main(["serve", "--port", "0", *flags]) == 1
    assert capsys.readouterr().err.count(words) == 1


def test_a_folder_may_have_an_equals_sign(tmp_path, capsys):
    (folder := tmp_path / "a=b").mkdir()
    assert main(["serve", "--port", "0", "--model", str(folder)]) == 1
    assert f"error: {folder}: " in capsys.readouterr().err


def test_options_of_pictures_have_the_form_of_vllm():
    flags = ["--limit-mm-per-prompt", '{"image": 8, "video": 0}']
    flags += ["--allowed-media-domains", "a.example", "*", "--allowed-media-domains", "b.example"]
    args = make_parser().parse_args(["serve", *flags])
    assert args.allowed_media_domains == ["a.example", "*", "b.example"]
    config = engine_config(args)
    assert config.limit_mm_per_prompt["image"] == 8
    again = make_parser().parse_args(["serve", *serve_flags(config)])
    assert engine_config(again) == config


MISSING = """
import sys
from vllm_metal_lite.cli.commands import make_parser
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.cli.options import engine_config, serve_flags

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Missing())
sys.exit(main(["serve"]))
"""


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "pydantic"])
def test_a_missing_extra_says_what_to_install(package):
    done = run_python("-c", MISSING, package)
    assert done.returncode == 1
    expected = f"error: the server needs {package}: {install('serve')}\n"
    assert (done.stdout, done.stderr) == ("", expected)


def test_the_command_with_everything(tmp_path):
    """Names, the key from the environment, a browser, a line per request, and Ctrl-C."""
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    env = {"METAL_LITE_API_KEY": "secret", "BROWSER": f"{browser} %s"}
    flags = "--served-model-name", "tiny", "--model", "other=demo", "--open", "--log-requests"
    with serve_command(tmp_path / "err", "demo", *flags, env=env) as command:
        url = command.url()
        with httpx.Client(base_url=url, timeout=SAFETY) as client:
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer secret"
            names = [model["id"] for model in client.get("/v1/models").json()["data"]]
            assert names == ["tiny", "other"]
            reply = client.post("/v1/chat/completions", json=HI).json()
            assert reply["model"] == "tiny"
            line = command.line()
            assert line.startswith(f"{reply['id']}: ")
            assert "prompt tokens (0 cached), 3 new in" in line
            assert line.endswith(", length")
            client.post("/v1/chat/completions", json={**HI, "surprise": 1, "max_tokens": "x"})
        eventually(opened.exists)
        eventually(lambda: opened.read_text() == f"{url}\n")
        command.signal(signal.SIGINT, group=True)
        assert command.leave() == 130
    err = command.err.read_text()
    assert "demo is a tiny model" in err
    assert "warning: /v1/chat/completions: fields of requests are ignored: 'surprise'" in err
    assert "secret" not in err
    assert "Traceback" not in err
