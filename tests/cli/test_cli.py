"""The command line's front door: help, errors of one line, exit codes, closed streams."""

import logging
import shlex
import subprocess
import sys

import pytest

from tests.support.run_python import run_python
from tests.support.server.cli_kit import COMMAND, SAFETY, model_folder, pipe
from vllm_metal_lite import __version__
from vllm_metal_lite.cli.main import main

# A command line, and words of the one line on stderr.
USAGE = {
    "": "",
    "bogus": "",
    "generate": "",
    "generate /": "",
    "generate /nowhere/in.jsonl": "",
    "generate /dev/null -o /nowhere/out.jsonl": "",
    "chat --nope": "error: unrecognized arguments: --nope (see vllm-metal-lite chat --help)",
    "chat a b": "error: unrecognized arguments: b (see vllm-metal-lite chat --help)",
    "chat --block-size 7": "error: --block-size",
    "chat --block-size many": "error: --block-size",
    "chat --dtype int4": "error: --dtype",
    "chat --memory-fraction nan": "error: --memory",
    "chat --stop=": "error: --stop",
    "chat --max-tokens 0": "error: --max-tokens",
    "chat --structured-outputs '{x'": "--structured-outputs: not JSON: Expecting property name",
    """chat --structured-outputs '{"x": 1}'""": "error: --structured-outputs has no field 'x'; ",
    "launch claude --print --port 0": "error: argument --port: must be an integer from 1 to",
    "launch other": "choose from",
    "launch claude -p x": "arguments: -p x: give those of the AGENT after --",
    "models /nowhere/at/all": "error: /nowhere/at/all: no such folder",
    "bench no/model --requests 0": "--requests: must be an integer from 1",
    "bench no/model --requests 1,x": "got 'x'",
    "bench no/model --requests 33": "--max-num-seqs (32), got 33",
    "bench no/model --seconds nan": "--seconds: must be a number from 1",
    "bench no/model --report=": ": No such file",
    "bench no/model --report /nowhere/a.json": "/nowhere/a.json: No such file",
    "serve --max-num-seqs 0": "--max-num-seqs must",
    "serve --bogus": "unrecognized arguments: --bogus",
    "serve demo demo": "unrecognized arguments: demo",
    "serve --model =demo": "--model must be MODEL or NAME=MODEL, got '=demo'",
    "serve --model big=": "--model must be MODEL or NAME=MODEL, got 'big='",
    "serve --model a=demo --model a=other": "two models have the name 'a'",
    "serve demo --model demo": "two models have the name 'demo'",
    "serve --model a=b\udcff": "models and their names must be UTF-8, got 'b\\udcff'",
    "serve --model demo --served-model-name x": "with --model, write NAME=MODEL",
    "serve --model a=demo --model b=demo --draft-model c": "--draft-model drafts for one model",
    "serve --pin nobody": "--pin nobody: no such model; the models are: demo",
    "serve --chat-format x=hermes": "--chat-format x=hermes: no such model; the models are: demo",
    "serve --chat-format demo=x": "--chat-format must be one of cohere, ",
}


@pytest.mark.parametrize("command", [(), ("chat",), ("generate",), ("bench",), ("serve",)])
def test_help_is_instant_and_shows_examples(command):
    script = (
        "import sys; from vllm_metal_lite.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as e: assert not e.code\n"
        "assert not {'mlx', 'numpy', 'transformers', 'uvicorn', 'starlette'} & set(sys.modules)"
    )
    done = run_python("-c", script, *command, "--help")
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
    for default in ("127.0.0.1", "8000", "32", "256", "10", "5") if "serve" in command else ():
        assert f"(default: {default})" in " ".join(done.stdout.split())


def test_version(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert e.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("line", USAGE)
def test_a_bad_command_line_is_one_line_and_2(line, capsys):
    assert main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert USAGE[line] in err
    assert err.count("\n") == 1


def test_a_warning_of_the_package_is_a_line_on_stderr(monkeypatch, capsys):
    logger = logging.getLogger("vllm_metal_lite.model.trial")
    monkeypatch.setattr("vllm_metal_lite.cli.doctor.run", lambda _: logger.warning("%d%% slow", 50))
    main(["doctor"])
    assert capsys.readouterr() == ("", "warning: 50% slow\n")
    logger.warning("The command is over")
    assert capsys.readouterr().err == ""


def test_a_bad_model_is_one_line_and_1(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "in.jsonl").touch()
    # The last one is on the Hub, where no network leads: the tests set HF_HUB_OFFLINE.
    for name in (tmp_path / "none", tmp_path / "empty", tmp_path / "file", "some-org/some-model"):
        out_file = tmp_path / "out.jsonl"
        argv = ["generate", str(tmp_path / "in.jsonl"), "-o", str(out_file), "--model", str(name)]
        assert main(argv) == 1
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert out == ""
        assert len(lines) == 2, err  # "Loading ..." and the error
        assert lines[1].startswith("error: ")
        assert str(name) in lines[1]
        assert not out_file.exists()


@pytest.mark.parametrize(("command", "flags"), [("serve", ["--port", "0"]), ("doctor", [])])
@pytest.mark.parametrize("name", ["/nowhere/at/all", "~nosuchuser/x"])
def test_a_model_that_is_not_there(command, flags, name, capsys):
    assert main([command, name, *flags]) == 1
    out, err = capsys.readouterr()
    assert out == "" or command == "doctor"  # which describes the machine first
    assert err.splitlines()[-1].startswith(f"error: {name}: no such folder")


def test_a_pipe_gets_the_error_and_nothing_else(tmp_path, capsys, monkeypatch):
    for model, words in (tmp_path, "no config.json"), (model_folder(template=False), "generate"):
        monkeypatch.setattr(sys, "stdin", pipe("hi"))
        assert main(["chat", str(model)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert words in err
        assert err.count("\n") == 1


@pytest.mark.long
def test_closed_streams_and_broken_pipes(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "x", "max_tokens": 4}\n' * 300)
    command = " ".join(COMMAND)
    script = f"""
        {command} chat <&-; echo "closed stdin: $?"
        echo '{{"prompt": "x"}}' | {command} generate - --max-tokens 2 \
            --model {model_folder()} >&- 2>&-; echo "closed outputs: $?"
        {command} generate {prompts} --max-num-seqs 2 --model {model_folder()} 2>{tmp_path}/err |
            head -1; echo "no reader: ${{PIPESTATUS[0]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=SAFETY)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["closed stdin: 1", "closed outputs: 0"]
    assert lines[2].startswith('{"id": 1, ')
    assert lines[3] == "no reader: 141"
    assert done.stderr == "error: there is no message on stdin\n"
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert "Exception" not in (tmp_path / "err").read_text()
