"""`launch`: what agents get, and what the user is told.  tests/agents/ runs agents themselves."""

import json
import os
import shlex
import socket
import stat
import subprocess
import tomllib
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGHUP, SIGTERM, getsignal, raise_signal, signal
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread
from time import sleep

import pytest

from tests.support.server.cli_kit import COMMAND, SAFETY
from tests.support.server.command import eventually, is_alive
from tools.lib.servers import free_port
from vllm_metal_lite.cli.launch import ServedModel, claude, codex, opencode
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.errors import MetalLiteError


@pytest.fixture
def launch(capsys):
    """Runs the command; returns (exit code, stdout, stderr)."""
    return lambda *args: (main(["launch", *args]), *capsys.readouterr())


ROOT = Path(__file__).parents[2]
HTTP = "HTTP/1.0 200 OK\r\n\r\n"
MODEL = ServedModel("http://127.0.0.1:8000", "a/b😀", 32768, "key")


def test_claude_finds_the_server_by_variables_and_leaves_the_account_alone():
    (program, flag, settings), added = claude(MODEL)
    assert (program, flag) == ("claude", "--settings")
    env = json.loads(settings)["env"]
    assert env["ANTHROPIC_BASE_URL"] == MODEL.url
    assert {v for k, v in env.items() if k.endswith("MODEL")} == {"a/b😀"}
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert env["ANTHROPIC_API_KEY"] == env["CLAUDE_CODE_USE_BEDROCK"] == ""  # the user's account
    assert added == {"ANTHROPIC_AUTH_TOKEN": "key"}  # which all users of a machine must not see
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in claude(replace(MODEL, context=None))[0][2]


def test_codex_gets_toml():
    (program, *flags), _ = codex(MODEL)
    assert program == "codex"
    assert flags[::2] == ["-c"] * (len(flags) // 2)
    config = tomllib.loads("\n".join(flags[1::2]))
    provider = config["model_providers"][config["model_provider"]]
    assert (config["model"], config["model_context_window"]) == ("a/b😀", 32768)
    assert (provider["base_url"], provider["wire_api"]) == (f"{MODEL.url}/v1", "responses")


def test_opencode_gets_json_with_what_the_user_s_variable_has(monkeypatch):
    own = {"theme": "dark", "model": "x/y", "provider": {"x": {"name": "X"}}}
    monkeypatch.setenv("OPENCODE_CONFIG_CONTENT", json.dumps(own))
    config = json.loads(opencode(MODEL)[1]["OPENCODE_CONFIG_CONTENT"])
    assert (config["theme"], config["provider"]["x"]) == ("dark", {"name": "X"})
    name, model = config["model"].split("/", 1)
    told = config["provider"][name]["models"][model]
    assert told["limit"]["context"] == 32768
    assert "attachment" not in told
    seeing = json.loads(opencode(replace(MODEL, sees=True))[1]["OPENCODE_CONFIG_CONTENT"])
    told = seeing["provider"][name]["models"][model]
    assert (told["attachment"], told["modalities"]["input"]) == (True, ["text", "image"])


@pytest.mark.parametrize("own", ["{", "[1]", "3"])
def test_an_opencode_variable_that_is_no_object_is_named(own, monkeypatch):
    monkeypatch.setenv("OPENCODE_CONFIG_CONTENT", own)
    with pytest.raises(MetalLiteError, match="OPENCODE_CONFIG_CONTENT is not"):
        opencode(MODEL)


@contextmanager
def answering(reply, seconds=0):
    """The port of a server that gives this reply to each request, after some time."""

    class Handler(BaseRequestHandler):
        def handle(self):
            self.request.recv(4096)
            sleep(seconds)
            self.request.sendall(reply.encode())

    with TCPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield str(server.server_address[1])
        server.shutdown()


def test_engine_options_that_a_running_server_does_not_get_are_named(launch):
    flags = "--max-model-len", "4096", "--no-prefix-caching"
    with answering(HTTP + '{"data": [{"id": "a/b", "max_model_len": 512}]}') as port:
        plain = launch("claude", "--print", "--port", port)
        given = launch("claude", "--print", "--port", port, *flags)
        limit = "--limit-mm-per-prompt"
        limited = launch("claude", "--print", "--port", port, limit, '{"image": 8}')
        as_ever = launch("claude", "--print", "--port", port, limit, '{"image": 100}')
    assert f"ignores {' '.join(flags)}: stop it, or give another --port" in given[2]
    assert '--limit-mm-per-prompt \'{"image": 8, ' in limited[2]
    assert "ignores" not in as_ever[2]
    assert given[:2] == plain[:2]
    assert "warning" not in plain[2]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("SSH-2.0-x\r\n", "does not serve models"),
        (HTTP + '{"data": [{}]}', "does not serve models"),
        ("HTTP/1.0 404 \r\n\r\n", "does not serve models"),
        ("HTTP/1.0 401 \r\n\r\n", "needs its API key: set METAL_LITE_API_KEY"),
        (HTTP + '{"data": [{"id": "a/b"}]}', "Using the server"),
    ],
)
def test_what_is_said_of_a_server(launch, monkeypatch, reply, words):
    """No proxy is asked for the server of this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering(reply) as port:
        assert words in launch("claude", "--print", "--port", port)[2]


@pytest.mark.long
def test_a_server_that_still_loads_its_model_is_waited_for(launch):
    with answering(HTTP + '{"data": [{"id": "a/b"}]}', seconds=6) as port:
        assert "Using the server" in launch("claude", "--print", "--port", port)[2]


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_print_shows_a_command_for_a_shell(launch, agent, tmp_path):
    model = "--model", str(tmp_path)  # `serve` names a folder's model after the folder alone
    code, out, err = launch(agent, "--port", "1", *model, "--print", "--", "-p", "a b")
    assert code == 0
    assert f": vllm-metal-lite serve --port 1 {tmp_path}\n" in err  # no server runs
    words = shlex.split(out.replace("\\\n", " "))
    assert agent in words
    assert str(tmp_path) not in out
    assert words[-2:] == ["-p", "a b"]


def test_an_agent_that_is_not_installed(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = launch("codex")
    assert code == 1
    assert "npm install -g @openai/codex" in err


def write_agent(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.mark.long
@pytest.mark.parametrize(
    ("last", "number", "code"),
    [("exit 7", 0, 7), ("exec sleep 600", SIGTERM, 143), ("exec sleep 600", SIGHUP, 129)],
)
def test_the_server_and_the_agent_end_together(tmp_path, last, number, code):
    """A program instead of the agent asks the server that was started for it."""
    agent, args, err = (tmp_path / name for name in ("codex", "args.txt", "err.txt"))
    write_agent(agent, f'echo $$ "$@" > args.txt\n{last}')
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    flags = ("--num-blocks", "64", "--max-num-seqs", "2", "--max-model-len", "512")
    port = free_port()
    command = [*COMMAND, "launch", "codex", "--port", str(port), *flags, "--", "exec", "go"]
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    with err.open("w") as stderr:
        launch = subprocess.Popen(command, env=env, cwd=tmp_path, stderr=stderr)
    eventually(lambda: launch.poll() is not None or (args.exists() and args.read_text()))
    launch.send_signal(number)
    assert launch.wait(SAFETY) == code, err.read_text()
    pid, *given = args.read_text().split()
    assert not is_alive(pid)
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port))
    assert given[-2:] == ["exec", "go"]
    assert "model_context_window=512" in given
    assert "Context:   512 tokens" in err.read_text()


def test_a_signal_while_the_agent_starts_ends_the_agent(launch, monkeypatch, request, tmp_path):
    for number in SIGTERM, SIGHUP:
        request.addfinalizer(partial(signal, number, getsignal(number)))
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **how):
            super().__init__(*args, **how)
            started.append(self)
            raise_signal(SIGTERM)

    write_agent(tmp_path / "codex", "exec sleep 600")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(subprocess, "Popen", Popen)
    with answering(HTTP + '{"data": [{"id": "a/b"}]}') as port, pytest.raises(SystemExit) as end:
        launch("codex", "--port", port)
    assert end.value.code == 128 + SIGTERM
    assert started[0].returncode == -SIGTERM
