"""`vllm-metal-lite generate`: lines in, lines out."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.server.cli_kit import COMMAND, CONTEXT, ENDLESS, SAFETY, model_folder
from tests.support.server.command import eventually
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.engine.llm import LLM
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.sampling_params import SamplingParams

GREEDY = ["--temperature", "0", "--max-tokens", "8", "--max-num-seqs", "2"]
CHAT = [{"role": "user", "content": "héllo 🎉"}]


@pytest.fixture
def generate(tmp_path):
    """Runs the command in this process on lines; returns (exit code, results)."""

    def run(*lines: str | dict | bytes, flags: tuple = ()) -> tuple[int, list[dict]]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_bytes(b"".join(_line(x) for x in lines))
        target.write_text("the results of an earlier run")
        files = [str(source), "-o", str(target), "--model", str(model_folder())]
        code = main(["generate", *files, *GREEDY, *flags])
        return code, [json.loads(x) for x in target.read_text().splitlines()]

    return run


def _line(x: str | dict | bytes) -> bytes:
    if isinstance(x, bytes):
        return x + b"\n"
    return (x if isinstance(x, str) else json.dumps(x)).encode() + b"\n"


def test_answers_are_the_engines_and_in_order(generate, capsys):
    jobs = [
        {"prompt": "abc"},
        {"prompt": "abc", "id": "mine", "max_tokens": 60.0},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 1, "priority": -1, "checkpoints": [1, 3]},
        {"messages": CHAT},
        *({"prompt": f"number {i} " * (i % 7 + 1), "max_tokens": i % 5 + 1} for i in range(20)),
    ]
    code, results = generate(*jobs)
    assert code == 0
    assert [r["id"] for r in results] == [1, "mine", *range(3, 25)]

    llm = LLM(str(model_folder()), max_num_seqs=2)
    for job, result in zip(jobs, results, strict=True):
        params = SamplingParams(temperature=0, max_tokens=int(job.get("max_tokens", 8)))
        wanted = llm.chat(CHAT, params) if "messages" in job else llm.generate(job, params)
        answer = wanted[0].outputs[0]
        assert result["token_ids"] == answer.token_ids
        assert result["text"] == answer.text
        assert result["finish_reason"] == "length"
        assert result["num_prompt_tokens"] == len(wanted[0].prompt_token_ids)
        assert result["num_cached_tokens"] >= 0
    last = capsys.readouterr().err.splitlines()[-1]
    new = sum(len(r["token_ids"]) for r in results)
    assert last.startswith("24 requests: ")
    assert f" {new} generated in " in last


def test_a_flag_wins_over_the_model_and_a_line_over_both(tmp_path):
    for file in model_folder().iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "generation_config.json"
    config.unlink(missing_ok=True)
    config.write_text('{"do_sample": false, "repetition_penalty": 1.5}')
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(_line({"prompt": "abc"}) + _line({"prompt": "abc", "max_tokens": 5}))
    files = [str(source), "-o", str(target), "--model", str(tmp_path)]
    assert main(["generate", *files, "--repetition-penalty", "1.1", "--max-tokens", "9"]) == 0
    wanted = SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=9)
    (answer,) = LLM(str(model_folder())).generate("abc", wanted)
    results = [json.loads(line)["token_ids"] for line in target.read_text().splitlines()]
    assert results == [answer.outputs[0].token_ids, answer.outputs[0].token_ids[:5]]


def test_bad_lines_hurt_nobody_else(generate, capsys):
    good = {"prompt": "good"}
    bad = [
        "{bad",
        b'{"prompt": "\xff"}',
        "[1]",
        "[" * 100_000,
        '{"prompt": "x", "stop": ' + "[" * 900 + "]" * 900 + "}",
        {"prompt": ""},
        {"prompt": 5},
        {"messages": []},
        {"messages": ["hi"]},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [CONTEXT]},
        {"prompt": "x", "messages": CHAT},
        {},
        {"prompt": "x", "max_tokenz": 3},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "temperature": 10**400},
        {"prompt": "x", "stop": 5},
        {"prompt": "x", "logit_bias": [1]},
        {"prompt": "x", "logit_bias": {"x": 1}},
        {"prompt": "x", "priority": "high"},
        {"prompt": "x", "checkpoints": 1},
        {"prompt": "x", "checkpoints": [True]},
        {"prompt": "x", "checkpoints": [100]},
        {"prompt": "x" * CONTEXT},
        '{"prompt": "\\ud800"}',
    ]
    code, results = generate(good, *bad, "", "  ", good)
    assert code == 1
    assert len(results) == len(bad) + 2
    for number, (line, result) in enumerate(zip(bad, results[1:-1], strict=True), 2):
        assert result.keys() == {"id", "error"}, line
        assert result["id"] == number
        assert result["error"].startswith(f"line {number}: ")
    assert results[-1]["id"] == len(bad) + 4  # blank lines count, but have no result
    assert results[0]["token_ids"] == results[-1]["token_ids"]
    assert f"error: {len(bad)} of {len(results)} lines" in capsys.readouterr().err

    code, results = generate({"prompt": "", "id": "a"}, {"prompt": "x", "id": {}})
    assert [r["id"] for r in results] == ["a", 2]


def test_a_line_whose_step_fails_harms_no_other(generate, monkeypatch):
    execute = ModelRunner.execute

    def fails(runner, batch, *args):
        if (batch.token_ids == 7).sum() > 3:
            raise RuntimeError("the device is lost")
        return execute(runner, batch, *args)

    monkeypatch.setattr(ModelRunner, "execute", fails)
    code, results = generate({"prompt": "good"}, {"prompt_token_ids": [7] * 4}, {"prompt": "good"})
    assert code == 1
    failed = "line 2: a step of the engine failed: the device is lost"
    assert results[1] == {"id": 2, "error": failed}
    assert results[0]["token_ids"] == results[2]["token_ids"]


def test_sampling_parameters_of_a_line(generate):
    code, results = generate(
        {"prompt": "x", "n": 2, "temperature": 1, "seed": 4},
        {"prompt": "x", "logprobs": 1, "prompt_logprobs": 0},
        {"prompt": "x", "logit_bias": {"65": 100}, "max_tokens": 2},
        flags=("--sample-seed", "7", "--frequency-penalty", "0.1"),
    )
    assert code == 0
    assert [len(o["token_ids"]) for o in results[0]["outputs"]] == [8, 8]
    assert results[0]["outputs"][0] != results[0]["outputs"][1]
    assert len(results[1]["logprobs"]) == 8
    assert results[1]["prompt_logprobs"] == [None]
    assert results[2]["token_ids"] == [65, 65]


def test_answers_of_a_form(generate):
    code, results = generate(
        {"prompt": "x"},
        {"prompt": "x", "structured_outputs": {"json": {"type": "boolean"}}},
        {"prompt": "x", "structured_outputs": {"regex": "("}},
        flags=("--structured-outputs", '{"choice": ["up", "down"]}'),
    )
    assert code == 1
    assert results[0]["text"] in ("up", "down")
    assert results[1]["text"].strip() in ("true", "false")
    assert "structured_outputs.regex" in results[2]["error"]


def test_a_line_of_messages_needs_a_chat_template(capfd, tmp_path):
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    assert main(["generate", str(lines), "--model", str(model_folder(template=False))]) == 1
    out, _ = capfd.readouterr()
    assert "has no chat template, so it takes no messages: give it a prompt" in out
    assert "generate" not in out


def test_the_input_is_not_overwritten(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    assert main(["generate", str(source), "-o", str(source)]) == 2
    assert source.read_text() == '{"prompt": "x"}\n'
    assert "is the input" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x", "max_tokens": 1}\n')
    argv = ["generate", str(source), "-o", "/dev/full", "--model", str(model_folder())]
    assert main([*argv, *GREEDY]) == 1
    assert capsys.readouterr().err.endswith(
        "error: the output cannot be written: No space left on device\n"
    )


def test_a_slow_pipe_streams_and_an_interrupt_keeps_what_is_done(tmp_path):
    target = tmp_path / "out.jsonl"
    argv = [*COMMAND, "generate", "-", "-o", target, "--model", model_folder(context=ENDLESS)]
    argv += ["--max-num-seqs", 4, *GREEDY]
    process = subprocess.Popen(
        list(map(str, argv)), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def send(*jobs: dict) -> None:
        process.stdin.write("".join(json.dumps(job) + "\n" for job in jobs))
        process.stdin.flush()

    def wait_for(count: int) -> None:
        eventually(lambda: target.exists() and target.read_text().count("\n") >= count)

    send({"prompt": "a"})
    wait_for(1)  # though the input continues
    send({"prompt": "b"}, {"prompt": "long", "max_tokens": ENDLESS - 8}, {"prompt": "c"})
    wait_for(2)
    process.send_signal(signal.SIGINT)
    assert process.wait(SAFETY) == 130
    results = [json.loads(x) for x in target.read_text().splitlines()]
    assert {r["id"] for r in results} in ({1, 2, 4}, {1, 2})
    err = process.stderr.read()
    process.stdin.close()
    assert "results are kept" in err
    assert "Traceback" not in err
    assert "Fatal" not in err
