"""The command `doctor`: on a CPU, and on a machine that seems to have a GPU (the CPU host)."""

import json
import re
from dataclasses import fields, replace
from functools import partial
from math import inf, nan
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.kernels import broken_machine
from tests.support.kernels.broken_machine import miscompile
from tests.support.kernels.device import gpu_on_host
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import devices
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import compare_tokens, isolated, ordering, speed, verdicts
from vllm_metal_lite.checks.check import CheckResult, Speed
from vllm_metal_lite.checks.ordering import Outcome
from vllm_metal_lite.cli import doctor, shared_report
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.errors import OutOfMemoryError
from vllm_metal_lite.specs import AttentionShape, KernelUse, RopeShape, WeightShape

SHAPE = AttentionShape(4, 2, 32, 32, mx.bfloat16)
TINY = KernelUse((SHAPE,), 16, (RopeShape(32),), (64,), (WeightShape(64, 32), WeightShape(32, 64)))

EQUAL = compare_tokens.Comparison("kernels", "right", 1, 2, {})
LONG = ("--seconds", "3600")  # enough on a busy machine


def run(*argv):
    return main(["doctor", *argv])


def report_of(capsys, *argv, code=0):
    assert run("--json", *argv) == code
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


# On a CPU


def test_a_cpu_is_told_what_is_not_checked(capsys):
    assert run() == 0
    out = capsys.readouterr().out
    assert "Kernels:   not checked: there is no GPU, or MLX does not use it" in out
    assert "Memory:    the engine would use" in out


def test_a_model_is_described_on_a_cpu_too(capsys):
    model = report_of(capsys, "demo")["model"]
    assert model["name"] == "demo"
    assert model["type"] == "qwen3"
    assert model["num_tokens"] >= model["max_model_len"]


def test_a_model_that_does_not_fit(monkeypatch, capsys):
    monkeypatch.setattr("vllm_metal_lite.backend.memory_limit", lambda: 1 << 20)
    assert run("demo") == 0
    assert "\nContext:   does not fit: weights " in capsys.readouterr().out


def test_the_report_is_the_json(capsys, tmp_path):
    file = tmp_path / "report.json"
    assert run("--report", str(file), "--json") == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert printed == written
    assert (written["report"], written["kind"]) == ("vllm-metal-lite", "doctor")
    assert written["schema"] == 2


def test_a_report_says_why_doctor_failed(tmp_path):
    file = tmp_path / "report.json"
    assert run(str(tmp_path / "none"), "--report", str(file)) == 1
    assert json.loads(file.read_text())["error"].startswith("MODEL: no such folder")


def test_a_report_that_cannot_be_written_is_refused_first(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_examine", lambda *_: pytest.fail("too late"))
    assert run("--report", str(tmp_path / "none" / "report.json")) == 2
    assert "none" in capsys.readouterr().err


def test_a_report_has_no_names_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_report.platform, "node", lambda: "adas-mac")
    model = tmp_path / "secret"
    model.mkdir()
    report = {
        "machine": {"chip": "Apple"},
        "checks": [{"failure": f"{Path.home()}/x.metal of {model} on adas-mac: bad"}],
        "problems": ("plain",),
    }
    found = shared_report.without_names(report, str(model))
    assert found["checks"][0]["failure"] == "~/x.metal of MODEL on HOST: bad"
    assert found["machine"] == {"chip": "Apple"}
    monkeypatch.setattr(shared_report.platform, "node", lambda: "local")  # a word of reports
    assert shared_report.without_names({"name": "local"}, str(model)) == {"name": "local"}


# On a GPU


@pytest.fixture
def a_gpu(monkeypatch, tmp_path):
    """Small shapes; no processes; nothing is timed."""
    monkeypatch.setattr(doctor, "COMMON", {"tiny": TINY})
    monkeypatch.setattr(speed, "copy_bandwidth", partial(speed.copy_bandwidth, 4096))
    monkeypatch.setattr(ordering, "stress", lambda: [Outcome("all launches in one", 9, None)])
    monkeypatch.setattr(compare_tokens, "PROMPTS", (3, 20))
    monkeypatch.setattr(compare_tokens, "STARTS", (1, 0))
    monkeypatch.setattr(compare_tokens, "NEW_TOKENS", 3)
    with gpu_on_host(monkeypatch, tmp_path / "cache"):
        yield


@pytest.mark.long
def test_a_machine_that_is_well(a_gpu, capsys, tmp_path):
    file = tmp_path / "report.json"
    assert run(*LONG, "--report", str(file)) == 0
    out, _ = capsys.readouterr()
    assert "paged_decode:         right in 2 checks, largest error" in out
    assert "skinny_gemm:          right in 2 checks" in out
    assert re.search(r"^Bandwidth: a copy moves \d+ GB/s$", out, re.MULTILINE)
    assert "Order:     ordered: all 9 reads are right, all launches in one" in out
    assert "Answers:   6 tokens in 2 answers of demo, by kernels and by the reference: equal" in out
    assert "Verdict:   everything is right" in out
    assert f"written to {file}" in out
    report = json.loads(file.read_text())
    assert report["problems"] == []
    assert {"checks", "bandwidth", "ordering", "answers"} <= set(report["seconds"])
    names = {field.name for field in fields(devices.DeviceProfile)}
    assert set(report["profile"]["constants"]) == names


def test_a_miscompiled_kernel_is_named_and_the_answers_stay_right(a_gpu, monkeypatch, capsys):
    miscompile(monkeypatch, "varlen_prefill")
    assert run(*LONG) == 1
    out = capsys.readouterr().out
    assert "varlen_prefill:       WRONG in 2 of 2 checks" in out
    assert "allowed" in out
    assert "\n  fallback: prompts use kv_gather and MLX's SDPA\n" in out
    assert "by the reference: equal" in out
    assert "The engine uses the fallback of a wrong kernel" in out
    assert "Next: please open an issue" in out
    assert "--attention reference" not in out


@pytest.mark.long
def test_a_kernel_that_ends_its_process_does_not_end_doctor(a_gpu, monkeypatch, capsys):
    words = broken_machine.command("gather_rows", "ends the process", "host")
    monkeypatch.setattr(isolated, "command", lambda: words)
    assert run(*LONG) == 1
    out = capsys.readouterr().out
    assert re.search(r"gather_rows: +WRONG in 1 of 1 checks\n.*ends the process: SIGABRT", out)
    assert re.search(r"add_rms_norm: +right in 2 checks", out)
    assert "Order:     not checked, because a kernel hangs or ends its process" in out
    assert re.search(
        "by kernels and by the reference: equal\nAttention: .*without gather_rows", out
    )


@pytest.fixture
def no_work(a_gpu, monkeypatch):
    """All parts pass without running.  Tests change these results, or put an error in their place.

    asked: the lists of checks that were to be run.
    """
    results = [CheckResult(check, 0.0) for check in doctor.checks_for(TINY)]
    found = {"results": results, "order": [Outcome("one", 9, None)], "answers": EQUAL}
    found |= {"bandwidth": 100e9, "asked": []}

    def check(checks, progress, *, timed, known):
        found["asked"].append(checks)
        for number, check in enumerate(checks):
            progress(number, len(checks), check)
        for result in found["results"] if timed else ():
            if isinstance(result, BaseException):
                raise result
            yield result

    def given(part):
        return Mock(side_effect=lambda *_: raised_or(found[part]))

    monkeypatch.setattr(verdicts, "remember", lambda _: None)
    monkeypatch.setattr(isolated, "results", check)
    monkeypatch.setattr(speed, "copy_bandwidth", given("bandwidth"))
    monkeypatch.setattr(ordering, "stress", given("order"))
    monkeypatch.setattr(compare_tokens, "compare", given("answers"))
    return found


def raised_or(value):
    if isinstance(value, BaseException):
        raise value
    return value


def test_answers_that_cannot_be_compared_are_no_problem(no_work, capsys):
    no_work["answers"] = OutOfMemoryError("demo does not fit")
    assert run() == 0
    out = capsys.readouterr().out
    assert "Answers:   not compared: demo does not fit" in out
    assert "Verdict:   everything that was tried is right" in out


def a_slow_kernel(found):
    number = next(i for i, r in enumerate(found["results"]) if r.kernel == "paged_decode")
    found["results"][number] = replace(found["results"][number], speed=Speed(1e-3, 1e-4))


def launches_out_of_order(found):
    found["order"] = [Outcome("one", 9, None), Outcome("all", 9, "read 3 saw 1")]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            a_slow_kernel,
            0,
            [
                "Bandwidth: a copy moves 100 GB/s\n",
                "1,000 us, its fallback 100 us",
                "SLOW: right, and 10.0 times slower than its fallback",
                "uses the fallback where that is faster; please open an issue",
                "everything is right, but a kernel is slow",
            ],
        ),
        (
            launches_out_of_order,
            1,
            ["Order:     WRONG, all: read 3 saw 1", "use `--attention reference`"],
        ),
    ],
)
def test_what_is_found_is_said(no_work, capsys, change, code, words):
    change(no_work)
    assert run() == code
    out = capsys.readouterr().out
    assert [text for text in words if text not in out] == []


@pytest.mark.parametrize("is_tie", [True, False])
def test_other_tokens_are_a_problem_unless_they_tie(no_work, capsys, is_tie):
    margin = 0.01 if is_tie else 2.0
    difference = compare_tokens.Difference(0, 4, 7, 8, margin, is_tie)
    no_work["answers"] = replace(no_work["answers"], differences=[difference])
    assert run() == (0 if is_tie else 1)
    out = capsys.readouterr().out
    assert f"answer 1, token 5: 7 instead of 8, {margin:.3f} standard deviations apart" in out
    assert ("equal but for ties" in out) == is_tie
    assert ("use `--attention reference`" in out) == (not is_tie)


def test_a_report_has_null_for_what_is_no_number(no_work, capsys, tmp_path):
    file = tmp_path / "report.json"
    difference = compare_tokens.Difference(0, 4, 7, 8, nan, False)
    no_work["answers"] = replace(no_work["answers"], differences=[difference])
    report = report_of(capsys, "--report", str(file), code=1)
    assert report["answers"]["differences"][0]["margin"] is None
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == report


def test_after_a_hang_no_graph_with_that_kernel_is_run(no_work, capsys):
    hung = replace(no_work["results"][0], failure="hangs: no result after 60 s", ended=True)
    no_work["results"][0] = hung
    no_work["order"] = no_work["bandwidth"] = AssertionError("must not begin")
    assert run() == 1
    out = capsys.readouterr().out
    assert "hangs: no result after 60 s" in out
    assert "Order:     not checked" in out


def test_ctrl_c_keeps_what_is_known(no_work, capsys, tmp_path):
    no_work["answers"] = KeyboardInterrupt()
    file = tmp_path / "report.json"
    assert run("--report", str(file)) == 130
    out = capsys.readouterr().out
    assert "Order:     ordered" in out
    assert "Verdict:   interrupted" in out
    report = json.loads(file.read_text())
    assert report["interrupted"]
    assert report["checks"]
    assert report["answers"] is None


def test_ctrl_c_in_the_checks_keeps_the_results_before_it(no_work, capsys):
    done = [replace(result, error=inf) for result in no_work["results"][:2]]
    no_work["results"] = [*done, KeyboardInterrupt()]
    report = report_of(capsys, code=130)
    assert [c["check"] for c in report["checks"]] == [str(result.check) for result in done]
    assert report["of_checks"] > len(done)


def test_a_hang_costs_its_deadline_once(a_gpu, monkeypatch, capsys):
    """The engine of the answers does not try the kernel again, not even at the demo's shapes."""
    tried = []

    def check(check, timed):
        tried.append(check.kernel)
        if check.kernel == "gather_rows":
            return CheckResult(check, failure="hangs: no result after 60 s", ended=True)
        return CheckResult(check, 0.0)

    monkeypatch.setattr(isolated, "run_here", check)
    assert run(*LONG) == 1
    assert tried.count("gather_rows") == 1
    assert re.search("Attention: .*without gather_rows", capsys.readouterr().out)


def test_a_model_without_attention_is_checked(a_gpu, monkeypatch, capsys, tmp_path):
    folder = tiny.write_folder(tmp_path / "mamba", "mamba2")
    monkeypatch.setattr(isolated, "run_here", lambda check, timed: CheckResult(check, 0.0))
    monkeypatch.setattr(compare_tokens, "compare", lambda *_: EQUAL)
    report = report_of(capsys, str(folder), *LONG)
    assert {"causal_conv", "gated_delta"} <= {check["kernel"] for check in report["checks"]}


def test_no_check_begins_when_the_time_is_over(a_gpu, monkeypatch, capsys, tmp_path):
    """Each check takes a second of an injected clock."""
    tried, file = [], tmp_path / "report.json"
    monkeypatch.setattr(doctor, "monotonic", lambda: len(tried))

    def check(check, timed):
        tried.append(check)
        return CheckResult(check, 0.0)

    monkeypatch.setattr(isolated, "run_here", check)
    monkeypatch.setattr(compare_tokens, "compare", lambda *_: EQUAL)
    assert run("--seconds", "5", "--report", str(file)) == 0
    assert len(tried) == 5
    report, out = json.loads(file.read_text()), capsys.readouterr().out
    total = report["of_checks"]
    assert report["not_tried"] == total - 5
    assert f"not tried: {total - 5} of {total} checks; --full tries all" in out
    assert "everything that was tried is right" in out
    assert report["problems"] == []


def test_full_adds_shapes(no_work):
    run("--full")
    timed, more = no_work["asked"]
    assert len(more) > 500
    assert not set(timed) & set(more)
