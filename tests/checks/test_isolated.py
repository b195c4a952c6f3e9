"""Checks in a separate process: each gives a result or a line, whatever that process does."""

import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from tests.support.kernels.broken_machine import impatient
from tests.support.server.command import eventually, is_alive
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import isolated
from vllm_metal_lite.checks.check import Check, CheckResult, NormShape, Speed
from vllm_metal_lite.specs import AttentionShape, RopeShape

pytestmark = pytest.mark.long

SHAPE = AttentionShape(4, 2, 32, 32, mx.float16, window=7, softcap=2.0)
CHECKS = [
    Check("paged_decode", SHAPE, 16),
    Check("merge_partitions", SHAPE, 16),
    Check("varlen_prefill", SHAPE, 16),
    Check("rope_write", SHAPE, 0, RopeShape(32, base=None, eps=1e-6)),
    Check("add_rms_norm", NormShape(64, mx.float16)),
]

# The program of a process whose checks pass, unless `acts` has an expression for the kernel.
PROCESS = """
import os, sys, time
from vllm_metal_lite.checks import run_check as child
from vllm_metal_lite.checks.check import CheckResult, Speed

def run(check, timed):
    acts = {ACTS}
    if check.kernel in acts:
        return acts[check.kernel](check)
    return CheckResult(check, 0.01, speed=Speed(1.0, 2.0) if timed else None)

child.run = run
child.main()
"""


def run(*checks, **options) -> list[CheckResult]:
    return list(isolated.results(*checks, **options))


@pytest.fixture
def process(monkeypatch):
    def replace_it(script: str = PROCESS, **acts: str) -> None:
        named = ", ".join(f"{name!r}: lambda check: {act}" for name, act in acts.items())
        script = script.replace("{ACTS}", "{" + named + "}")
        monkeypatch.setattr(isolated, "command", lambda: [sys.executable, "-c", script])
        monkeypatch.setattr(isolated, "run_here", lambda check, timed: CheckResult(check, 0.5))

    return replace_it


def lines(**options) -> dict[str, str]:
    return {r.kernel: "right" if r.passed else str(r) for r in run(CHECKS, **options)}


RIGHT = {check.kernel: "right" for check in CHECKS}


def test_results_cross_the_process_whole(process):
    process(varlen_prefill="CheckResult(check, failure='no such function')")
    results = run(CHECKS, timed=True)
    assert [r.check for r in results] == CHECKS
    assert results[0] == CheckResult(CHECKS[0], 0.01, speed=Speed(1.0, 2.0))
    assert results[2] == CheckResult(CHECKS[2], failure="no such function")


def test_progress_is_told_before_each_check(process):
    process()
    told = []
    run(CHECKS, lambda *what: told.append(what))
    assert told == [(i, len(CHECKS), check) for i, check in enumerate(CHECKS)]


@pytest.mark.parametrize(
    ("act", "line"),
    [
        ("time.sleep(60)", "hangs: no result after 2 s"),
        ("os.abort()", "ends the process: SIGABRT"),
        ("os._exit(3)", "ends the process: exit code 3"),
        (
            "print('shader fault', file=sys.stderr) or os._exit(3)",
            "ends the process: exit code 3 (shader fault)",
        ),
        ("os.write(1, b'[]') and os._exit(3)", "ends the process: exit code 3 ([])"),
    ],
)
def test_only_the_kernel_at_fault_is_lost(process, act, line):
    process(varlen_prefill=act)
    with impatient("varlen_prefill", "hangs" if "sleep" in act else "", 2.0):
        found = lines()
    assert found == RIGHT | {"varlen_prefill": f"{CHECKS[2]}: {line}"}


def test_what_needs_a_failed_kernel_says_nothing(process):
    process(paged_decode="CheckResult(check, failure='no such function')")
    assert list(lines()) == ["paged_decode", "varlen_prefill", "rope_write", "add_rms_norm"]
    process()
    failed = CheckResult(CHECKS[0], failure="found before")
    assert len(run(CHECKS[1:], known=[failed])) == 3


def test_a_kernel_that_hangs_is_not_tried_again(process, monkeypatch):
    process(add_rms_norm="time.sleep(60)")
    monkeypatch.setattr(isolated, "DEADLINE", 0.2)
    assert len(run([Check("add_rms_norm", NormShape(n, mx.float16)) for n in (64, 128, 256)])) == 1


@pytest.mark.parametrize(
    "script", ["raise ImportError('no module named mlx')", 'print(\'{"device": "another"}\')', "#"]
)
def test_without_a_process_that_works_checks_run_here(process, script):
    process(script)
    assert [r.error for r in run(CHECKS)] == [0.5] * len(CHECKS)


@pytest.mark.parametrize("words", [None, ["/nowhere/python"]])
def test_without_a_python_to_start_checks_run_here(process, monkeypatch, words):
    process()
    monkeypatch.setattr(isolated, "command", lambda: words)
    assert [r.error for r in run(CHECKS)] == [0.5] * len(CHECKS)


def test_the_command_is_that_of_this_python(monkeypatch):
    """Without a GPU only this process has a replacement; an embedded Python may have no path."""
    monkeypatch.setattr(backend, "is_cpu", lambda: True)
    assert isolated.command() is None
    monkeypatch.setattr(backend, "is_cpu", lambda: False)
    assert isolated.command()[0] == sys.executable
    monkeypatch.setattr(sys, "executable", "")
    assert isolated.command() is None


def test_a_process_that_cannot_start_leaves_no_file_open(monkeypatch):
    monkeypatch.setattr(isolated, "command", lambda: ["/no/such/program"])
    before = os.listdir("/dev/fd")
    with pytest.raises(OSError, match="such") as error:  # keeps the frames, and what they opened
        isolated.Child()
    assert os.listdir("/dev/fd") == before, error


def test_a_full_disk_costs_only_what_the_process_said(process, monkeypatch):
    process(varlen_prefill="os._exit(3)")
    monkeypatch.setattr(
        isolated.tempfile, "TemporaryFile", Mock(side_effect=OSError(28, "No space left on device"))
    )
    assert lines()["varlen_prefill"].endswith("ends the process: exit code 3")


SCRIPT = """
import sys
from vllm_metal_lite.checks import isolated
from tests.checks.test_isolated import CHECKS, PROCESS

act = "open(sys.argv[1], 'w').write(str(os.getpid())) and time.sleep(60)"
script = PROCESS.replace("{ACTS}", "{'paged_decode': lambda check: %s}" % act)
isolated.command = lambda: [sys.executable, "-c", script, sys.argv[1]]
list(isolated.results(CHECKS))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_kernel_that_hangs_ends_with_its_parent(tmp_path, number):
    """The child ends after Ctrl-C, and if its parent is gone."""
    file = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    child = int(eventually(lambda: file.exists() and file.read_text().strip()))
    parent.send_signal(number)
    parent.wait(600)
    eventually(lambda: not is_alive(child))
