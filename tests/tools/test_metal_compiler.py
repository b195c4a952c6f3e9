"""The workflow's report on Apple's compiler, with a replacement for the compiler."""

import os
from pathlib import Path

import pytest

from tests.support.run_python import run_python

SCRIPT = Path(__file__).parents[2] / ".ci" / "metal_compiler.py"
XCRUN = """#!/bin/sh
case "$*" in *metal9.9*) echo "unknown metal9.9" >&2; exit 1;; esac
while [ "$1" != -c ]; do shift; done
if grep -q BAD "$2"; then echo "error: BAD" >&2; exit 1; fi
"""


def compile_texts(tmp_path: Path, texts: list[str], *versions: str) -> tuple[int, str]:
    """Runs the script on texts; returns (exit code, the job's summary)."""
    xcrun, folder, summary = (tmp_path / name for name in ("xcrun", "texts", "summary"))
    xcrun.write_text(XCRUN)
    xcrun.chmod(0o755)
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.metal").write_text(text)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(summary)}
    words = [SCRIPT, folder, "--include", tmp_path, "--std", *versions]
    done = run_python(*words, env=os.environ | variables)
    return done.returncode, summary.read_text() if summary.exists() else ""


def test_a_version_that_xcode_does_not_know_is_skipped_aloud(tmp_path):
    code, summary = compile_texts(tmp_path, ["good", "good"], "metal3.1", "metal9.9")
    assert code == 0
    assert "metal3.1 | 2 of 2 texts compile" in summary
    assert "metal9.9 | skipped" in summary


@pytest.mark.parametrize(
    ("texts", "version"), [(["good", "BAD"], "metal3.1"), (["good"], "metal9.9"), ([], "metal3.1")]
)
def test_an_error_no_compiler_and_no_text_fail_the_job(tmp_path, texts, version):
    assert compile_texts(tmp_path, texts, version)[0] == 1
