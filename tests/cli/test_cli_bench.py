"""`vllm-metal-lite bench`: what is measured, what a time limit leaves out, and the report."""

import json
import os
import signal
import sys
from statistics import median
from types import SimpleNamespace

import pytest

from tests.support.server.cli_kit import CONTEXT, model_folder
from vllm_metal_lite.cli import machine, shared_report
from vllm_metal_lite.cli.bench import suite
from vllm_metal_lite.cli.bench.cases import SETTLE_STEPS, BenchCase, make_cases
from vllm_metal_lite.cli.bench.engines import ThisEngine
from vllm_metal_lite.cli.bench.suite import Suite, Timing, drive, medians
from vllm_metal_lite.cli.bench.table import ratio, table
from vllm_metal_lite.cli.files import check_writable, write_json
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import MetalLiteError, RequestError

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


class Script:
    """An engine that does in each step what a script says: the requests that get a token."""

    name = "ours"

    def __init__(self, *steps: list[int]) -> None:
        self.steps, self.ended = iter(steps), False

    def begin(self, prompts, max_tokens) -> None:
        self.ended = False

    def step(self) -> list[int]:
        return next(self.steps)

    def end(self) -> None:
        self.ended = True


def test_both_engines_are_measured_and_the_report_says_so(bench):
    out, _, report = bench("--compare")
    assert (report["report"], report["schema"], report["kind"]) == ("vllm-metal-lite", 2, "bench")
    assert not report["interrupted"]
    assert [(c["requests"], c["context"]) for c in report["cases"]] == [(1, 16), (3, 16)]
    for case in report["cases"]:
        for engine in "ours", "mlx_lm":
            assert all(case[engine][field] > 0 for field in Timing._fields)
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

    def interrupted(timings):
        os.kill(os.getpid(), signal.SIGINT)
        return medians(timings)

    monkeypatch.setattr("vllm_metal_lite.cli.bench.suite.medians", interrupted)
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


class Ticks(Script):
    """A script whose steps take half a second each of an injected clock."""

    def __init__(self, monkeypatch, *steps: list[int]) -> None:
        super().__init__(*steps)
        self.now = 0.0
        monkeypatch.setattr(suite, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step(self) -> list[int]:
        self.now += 0.5
        return super().step()


def test_decodes_count_while_all_requests_decode(monkeypatch):
    """Request 0 has three tokens before request 1 has its first."""
    together = [[0, 1]] * (SETTLE_STEPS + 5)
    engine = Ticks(monkeypatch, [], [0], [0], [0], [1], *together)
    result = drive(engine, [[1] * 100] * 2, 5, 50, lambda: False)
    assert result == Timing(median([1.0, 2.5]), 200 / 2.5, 2 / 0.5)
    assert engine.ended
    assert next(engine.steps, None) is None, "all steps are needed"


@pytest.mark.parametrize(("max_tokens", "most_seconds"), [(50, 5), (SETTLE_STEPS + 3, 50)])
def test_a_run_that_is_too_short_has_no_decode_rate(monkeypatch, max_tokens, most_seconds):
    engine = Ticks(monkeypatch, *[[0, 1]] * (SETTLE_STEPS + 3))
    result = drive(engine, [[1], [1]], 5, max_tokens, lambda: engine.now >= most_seconds)
    assert result == Timing(0.5, 4.0, None)


def test_a_run_without_all_first_tokens_has_no_result(monkeypatch):
    engine = Ticks(monkeypatch, [0], [0])
    assert drive(engine, [[1], [1]], 5, 50, lambda: engine.now >= 1) is None
    assert engine.ended


def test_an_engine_that_fails_is_left_empty():
    engine = Script()
    with pytest.raises(StopIteration):
        drive(engine, [[1]], 5, 50, lambda: False)
    assert engine.ended


def test_a_time_limit_skips_and_says_how_long():
    silent = Script()
    silent.step = list  # nothing ever comes
    tried = Suite([silent], range(9), 4, 10**9, seconds=-1.0)
    tried.run([BenchCase(1, 8, 50)], stop=lambda: False)
    assert tried.results[0].skipped == "did not end within the time limit"
    assert not tried.results[0].timings


def test_cases_begin_with_the_fewest_tokens_and_fit_the_context():
    cases = make_cases([1, 4], [8, 500], 8, 100, EngineConfig())
    assert cases == sorted(cases, key=lambda case: case.requests * case.context)
    assert all(case.context + case.max_tokens <= 100 for case in cases)
    with pytest.raises(RequestError, match=r"--new-tokens 8 needs .* context of 10 tokens"):
        make_cases([1], [8], 8, 10, EngineConfig())


def test_a_ratio_above_1_means_that_ours_is_better():
    timings = {"ours": Timing(1.0, 20.0, None), "mlx-lm": Timing(2.0, 10.0, 5.0)}
    assert ratio(timings, "seconds_to_first", more=False) == 2.0
    assert ratio(timings, "prompt_rate", more=True) == 2.0
    assert ratio(timings, "decode_rate", more=True) is None
    assert table([])


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


def test_the_facts_of_a_mac(monkeypatch):
    tools = {
        "sysctl": "Apple M3 Max\n",
        "ioreg": '+-o AGXAcceleratorG15X\n    | "gpu-core-count" = 40\n',
    }
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(machine, "_output", lambda tool, *_: tools[tool])
    facts = machine.facts()
    found = facts["chip"], facts["gpu_cores"], facts["system"]
    assert found == ("Apple M3 Max", 40, "macOS 15.1")
    tools["ioreg"] = ""
    assert machine.facts()["gpu_cores"] is None
