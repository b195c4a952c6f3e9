"""Reports of runs that are cut off, and engines that start at once."""

import argparse
import json
import re
import sys

import pytest

from tests.support.models import tiny_models as tiny
from tools.bench import engine as bench_engine
from tools.bench import speculation
from tools.bench.lib.engines import Run
from tools.bench.lib.loads import Load, Wave
from tools.bench.lib.trust import trusted
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kv.store import PagedStore


def test_runs_are_written_one_by_one_and_an_engine_that_fails_is_left_out(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("cuGraphAddKernelNode: invalid argument")

    report = bench_engine.Report(str(tmp_path / "a.json"))
    args = argparse.Namespace(report=report)
    bench = bench_engine.Bench("D", Load("one", [Wave([[1]], [2])]), args)
    engine = argparse.Namespace(name="mlx-lm 16/32", way="none")
    done = Run([0.0], [[0.1, 0.2]], [[1, 2]], [[1]], seconds=0.2)
    monkeypatch.setattr(bench_engine, "drive", lambda *_: done)
    assert bench.tried(engine)["output_tokens_per_s"] == 10
    monkeypatch.setattr(bench_engine, "drive", fails)
    assert bench.tried(engine) is None
    runs = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert [r["note"] for r in runs] == ["sweep", "failed"]
    assert runs[1]["why"].endswith("invalid argument")


def test_a_trusted_engine_uses_every_kernel_for_all_rows(monkeypatch):
    model = tiny.packed("qwen3", mx.bfloat16)
    store = PagedStore(model.packed.layout.specs, 4, 8)
    monkeypatch.setattr(decide.Trial, "problem", lambda *_: pytest.fail("a trial"))
    with trusted("varlen"):
        verdict = verdicts.verify(None)
        fusion = decide.decide(model.packed, KernelAttention(store, verdict.prefill, ()))
    assert not verdict.failures
    assert fusion.skinny_rows == range(1, 65)


def test_drafts_of_an_edited_text_are_accepted(monkeypatch, capsys):
    how = "--tiny --only edit --requests 1 --runs 1"
    monkeypatch.setattr(sys, "argv", ["speculation.py", *how.split()])
    speculation.main()
    assert int(re.search(r"(\d+) of \d+ \|$", capsys.readouterr().out.rstrip())[1]) > 0
