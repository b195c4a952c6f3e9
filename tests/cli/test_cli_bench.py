"""`vllm-metal-lite bench`: what is measured, what a time limit leaves out, and the report."""

import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.server.cli_kit import CONTEXT, model_folder
from vllm_metal_lite import benchmark
from vllm_metal_lite.benchmark import SETTLED, Load, Run, ThisEngine, drive, firsts, steady
from vllm_metal_lite.cli import shared_report
from vllm_metal_lite.cli.bench import COLUMNS, Suite, make_cases, summary, table
from vllm_metal_lite.cli.files import check_writable, write_json
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import MetalLiteError, RequestError
from vllm_metal_lite.model.loader import load as load_model

SMALL = ["--requests", "1,3", "--context", "16", "--new-tokens", "8", "--seconds", "60"]


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the command on a tiny model; returns (stdout, stderr, the report)."""

    def run(*flags: str) -> tuple[str, str, dict]:
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        code = main(["bench", str(model_folder()), *SMALL, "--report", str(path), *flags])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out, err, json.loads(path.read_text())

    return run


def test_both_engines_are_measured_and_the_report_says_so(bench):
    out, _, report = bench("--compare")
    assert (report["report"], report["schema"], report["kind"]) == ("vllm-metal-lite", 2, "bench")
    assert not report["interrupted"]
    assert [(c["requests"], c["context"]) for c in report["cases"]] == [(1, 16), (3, 16)]
    for case in report["cases"]:
        for engine in "ours", "mlx_lm":
            assert all(case[engine][field] > 0 for _, field, *_ in COLUMNS)
        assert case["ratios"]["decode_rate"] == pytest.approx(
            case["ours"]["decode_rate"] / case["mlx_lm"]["decode_rate"]
        )
    assert "ratio" in out


def test_a_report_holds_no_folder(bench, monkeypatch, tmp_path):
    (tmp_path / "kernels").mkdir()
    monkeypatch.chdir(tmp_path)
    _, _, report = bench()
    assert report["model"]["name"] == "local"
    assert str(model_folder()) not in json.dumps(report)
    assert "mlx_lm" not in report["cases"][0]
    assert shared_report.without_names("by kernels", "kernels") == "by kernels"
    for name in "demo", "org/model":
        assert shared_report.public_name(name) == name


def test_a_context_that_does_not_fit_is_cut(bench):
    _, err, report = bench("--requests", "1", "--context", f"16,{4 * CONTEXT}")
    longest = max(case["context"] for case in report["cases"])
    assert 0 < longest < CONTEXT
    assert f"cut to {longest:,} tokens" in err


def test_what_is_too_long_or_too_large_is_skipped(bench):
    _, _, report = bench("--num-blocks", "12", "--requests", "1,2,30", "--max-model-len", "100")
    assert [("skipped" in case) for case in report["cases"]] == [False, False, True]
    assert "the memory holds" in report["cases"][2]["skipped"]


def test_an_error_names_its_own_option(capsys):
    assert main(["bench", str(model_folder()), "--attention", "kernels", "--requests", "1"]) == 1
    err = capsys.readouterr().err
    assert "--attention" in err
    assert "--context" not in err


def test_control_c_shows_what_is_measured_so_far(monkeypatch, capsys, tmp_path):
    """Ctrl-C comes after the first of two cases."""

    def interrupted(turns):
        os.kill(os.getpid(), signal.SIGINT)
        return summary(turns)

    monkeypatch.setattr("vllm_metal_lite.cli.bench.summary", interrupted)
    path = tmp_path / "report.json"
    assert main(["bench", str(model_folder()), *SMALL, "--report", str(path)]) == 130
    report = json.loads(path.read_text())
    assert report["interrupted"]
    assert len(report["cases"]) == 1
    assert report["cases"][0]["ours"]["decode_rate"] > 0
    assert "first token, ms" in capsys.readouterr().out


def test_an_engine_that_fails_spoils_its_case_only(monkeypatch, capsys):
    step = ThisEngine.step

    def failing(engine):
        if len(engine._seen) > 1:
            raise RuntimeError("[metal::malloc] too much")
        return step(engine)

    monkeypatch.setattr(ThisEngine, "step", failing)
    assert main(["bench", str(model_folder()), *SMALL]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "skipped" not in out[1]
    assert out[2].endswith("skipped: ours fails: [metal::malloc] too much")


# Measuring


class Script:
    """An engine that does in each step what a script says: the requests that get a token.  A step
    takes half a second of an injected clock."""

    resident_bytes, now, ended = 0, 0.0, False

    def __init__(self, monkeypatch, *steps: list[int]) -> None:
        self.steps = iter(steps)
        monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def begin(self, load) -> None:
        self.ended = False

    def add(self, first, prompts, max_tokens) -> None:
        pass

    def step(self) -> list[tuple[int, int]]:
        self.now += 0.5
        return [(i, 7) for i in next(self.steps)]

    def end(self) -> int:
        self.ended = True
        return 0


def run_of(engine, requests: int, new_tokens: int, most_seconds: float = 1e9) -> Run:
    load = Load([[1]] * requests, [50] * requests, [SETTLED + new_tokens] * requests)
    return drive(engine, load, lambda: engine.now >= most_seconds)


def test_decodes_count_while_all_requests_decode(monkeypatch):
    """Request 0 has three tokens before request 1 has its first."""
    together = [[0, 1]] * (SETTLED - 1 + 5)
    engine = Script(monkeypatch, [], [0], [0], [0], [1], *together)
    run = run_of(engine, 2, new_tokens=5)
    assert firsts(run) == [1.0, 2.5]
    assert steady(run) == {"steady_tokens_per_s": 2 / 0.5, "steady_step_median": 0.5}
    assert engine.ended
    assert next(engine.steps, None) is None, "all steps are needed"


@pytest.mark.parametrize(("new_tokens", "most_seconds"), [(5, 5), (3, 50)])
def test_a_run_that_is_too_short_has_no_decode_rate(monkeypatch, new_tokens, most_seconds):
    engine = Script(monkeypatch, *[[0, 1]] * (SETTLED + 3))
    run = run_of(engine, 2, new_tokens, most_seconds)
    assert firsts(run) == [0.5, 0.5]
    assert steady(run) == {}


def test_an_engine_that_fails_is_left_empty(monkeypatch):
    engine = Script(monkeypatch)
    with pytest.raises(StopIteration):
        run_of(engine, 1, new_tokens=5)
    assert engine.ended


@pytest.mark.parametrize("seconds", [-1.0, 0.2])
def test_a_time_limit_skips_and_says_how_long(monkeypatch, seconds):
    """The limit ends before the first step, and before request 1 has its first token."""
    engine = Script(monkeypatch, [0], [0])
    monkeypatch.setattr("vllm_metal_lite.cli.bench.time", benchmark.time)
    engines = {"ours": lambda _: engine}
    tried = Suite(engines, np.arange(9), 4, 50, 10**9, seconds, stop=lambda: False)
    tried.run([(2, 8)])
    why = "did not end within the time limit"
    assert tried.rows == [{"requests": 2, "context": 8, "skipped": why}]
    assert engine.ended


def test_cases_begin_with_the_fewest_tokens_and_fit_the_context():
    cases, room = make_cases([1, 4], [8, 500], 8, 100, EngineConfig())
    assert cases == [(1, 8), (4, 8), (1, 100 - room), (4, 100 - room)]
    with pytest.raises(RequestError, match=r"--new-tokens 8 needs .* context of 10 tokens"):
        make_cases([1], [8], 8, 10, EngineConfig())
    one_a_step = EngineConfig(max_num_batched_tokens=1, max_num_seqs=4096)
    with pytest.raises(RequestError, match="more than the context of 100 tokens"):
        make_cases([4096], [8], 8, 100, one_a_step)  # all but one would wait


@pytest.mark.parametrize("policy", ["mixed", "alternate", "whole"])
@pytest.mark.parametrize("threshold", [0, 32])
def test_requests_have_room_for_their_tokens_while_others_wait(policy, threshold):
    """The engine itself, with a case whose prompts take many steps."""
    options = {"prefill_policy": policy, "long_prefill_token_threshold": threshold}
    config = EngineConfig(max_num_batched_tokens=40, max_num_seqs=5, speculate="off", **options)
    _, room = make_cases([5], [64], 8, 300, config)
    engine = ThisEngine(LLMEngine(load_model("demo"), replace(config, num_blocks=200)))
    load = Load([[i + 1] * 64 for i in range(5)], [room] * 5, [SETTLED + 8] * 5)
    counts = [len(tokens) for tokens in drive(engine, load).tokens]
    assert min(counts) == SETTLED + 8
    assert max(counts) <= room <= max(counts) + 2


def test_a_ratio_above_1_means_that_ours_is_better():
    ours = {"seconds_to_first": 1.0, "prompt_rate": 20.0}
    theirs = {"seconds_to_first": 2.0, "prompt_rate": 10.0, "decode_rate": 5.0}
    row = summary([{"ours": ours, "mlx_lm": theirs}])
    assert row["ratios"] == {"seconds_to_first": 2.0, "prompt_rate": 2.0, "decode_rate": None}
    assert row["ours"]["decode_rate"] is None
    *_, line, once, _ = table([{"requests": 1, "context": 8, **row}])
    assert " ".join(line.split()) == "8 1 1,000 2,000 2.00 20 10 2.00 - 5 - *"
    assert once.startswith("*: one or two runs")


def test_the_first_turns_do_not_count_if_others_follow():
    turns = [{"ours": {"seconds_to_first": float(i)}} for i in range(1, 6)]
    rows = [summary(turns[:n]) for n in range(1, 6)]
    assert [row["ours"]["seconds_to_first"] for row in rows] == [1, 2, 3, 3.5, 4]
    assert [row["turns_counted"] for row in rows] == [1, 1, 1, 2, 3]
    assert [row["compiling_included"] for row in rows] == [True, True, False, False, False]


# Reports


def test_a_report_is_never_overwritten(tmp_path):
    path = tmp_path / "a.json"
    check_writable(str(path), replaces=False)
    assert not path.exists()
    write_json(str(path), shared_report.new_report("bench"))
    with pytest.raises(MetalLiteError, match="not overwritten"):
        check_writable(str(path), replaces=False)
    with pytest.raises(MetalLiteError, match="not overwritten"):
        write_json(str(path), {})
    check_writable("/dev/null", replaces=False)
    (link := tmp_path / "link").symlink_to("b.json")
    check_writable(str(link), replaces=True)
    assert [link.is_symlink(), link.exists()] == [True, False]
    write_json("/dev/null", {})


def test_the_facts_of_a_mac(monkeypatch, tmp_path):
    tools = {"sysctl": "Apple M3 Max", "ioreg": '    | "gpu-core-count" = 40'}
    for name, said in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    facts = shared_report.machine_facts()
    found = facts["chip"], facts["gpu_cores"], facts["system"]
    assert found == ("Apple M3 Max", 40, "macOS 15.1")
    (tmp_path / "ioreg").write_text("#!/bin/sh\n")
    assert shared_report.machine_facts()["gpu_cores"] is None
