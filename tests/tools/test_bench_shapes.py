"""The benchmark over the shapes of the table: its parts run alone, and what is cut off is kept."""

import argparse
import json
import sys
import threading
import time

import pytest

from tests.support import tiny_models as tiny
from tools.bench import serving as bench_serving
from tools.bench import shapes as bench_shapes
from tools.bench.lib.alone import Alone
from tools.bench.lib.configs import SHAPES
from tools.bench.lib.engines import Run
from tools.bench.lib.loads import Load, Wave
from tools.bench.lib.parts import PARTS
from tools.bench.lib.trust import trusted
from tools.bench.shapes import cells, read, speeds
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kv.store import PagedStore


def run(load: str, note: str, engine: str, speed: float) -> dict:
    metrics = {"output_tokens_per_s": speed}
    return {"load": load, "note": note, "engine": engine, "metrics": metrics}


RUNS = [
    run("H", "warm-up", "ours", 100),
    run("H", "sweep", "mlx-lm 8/32", 20),
    run("H", "sweep", "mlx-lm 16/32", 30),
    run("H", "turn 1", "ours", 120),
    run("H", "turn 2", "ours", 130),
    run("D", "warm-up", "ours", 9),
]


def test_counted_turns_come_before_warm_ups():
    assert speeds(RUNS, "H") == {
        "ours": (125, True), "mlx-lm 8/32": (20, False), "mlx-lm 16/32": (30, False),
    }  # fmt: skip


def test_the_row_of_a_part_that_was_cut_off():
    assert cells({"runs": RUNS}, "H") == ["125", "30 *", "**4.17**"]
    assert cells({"runs": RUNS}, "D") == ["9 *", "", ""]


def test_every_part_has_a_shape_and_a_tiny_one():
    for part in PARTS:
        assert {part.shape, part.tiny} <= {*SHAPES, "128x2"}


def test_a_part_is_measured_and_a_finished_one_is_not_run_again(tmp_path, monkeypatch, capfd):
    arguments = f"--results {tmp_path} --tiny --only qwen3-0.6b-4 --load D --minutes 9"
    monkeypatch.setattr(sys, "argv", ["bench/shapes.py", *arguments.split()])
    assert bench_shapes.main() == 0
    report = read(tmp_path / "qwen3-0.6b-4.json")
    assert report["finished"]
    assert {r["note"] for r in report["runs"]} == {"warm-up", "sweep", "turn 1"}
    monkeypatch.setattr(bench_shapes, "command", lambda *_: pytest.fail("again"))
    assert bench_shapes.main() == 0
    assert "| qwen3-0.6b-4 |" in capfd.readouterr().out


def test_parts_side_by_side_are_timed_one_at_a_time(tmp_path, monkeypatch, capfd):
    arguments = f"--results {tmp_path} --tiny --only qwen3-0.6b-4 glm-4.7-flash-4 --load D"
    arguments += f" --beside {tmp_path / 'lock'}"
    monkeypatch.setattr(sys, "argv", ["bench/shapes.py", *arguments.split()])
    assert bench_shapes.main() == 0
    for name in ("qwen3-0.6b-4", "glm-4.7-flash-4"):
        assert read(tmp_path / f"{name}.json")["finished"]
    assert "cut off" not in capfd.readouterr().out


def test_a_counted_run_waits_for_who_warms_up_and_runs_alone(tmp_path):
    one, events, entered = Alone(tmp_path / "lock"), [], threading.Event()

    def count(name: str, alone: Alone) -> None:
        with alone():
            events.append(name)
            entered.set()
            time.sleep(0.02)
            events.append(name)

    # The lock goes with its object, as with its process.
    thread = threading.Thread(target=lambda: count("two", Alone(tmp_path / "lock")))
    thread.start()
    assert not entered.wait(0.1)  # `one` warms up
    count("one", one)
    del one
    thread.join(60)
    assert events in (["one", "one", "two", "two"], ["two", "two", "one", "one"])


def test_no_part_starts_when_the_time_is_over(tmp_path, monkeypatch, capfd):
    arguments = f"--results {tmp_path} --tiny --minutes 0"
    monkeypatch.setattr(sys, "argv", ["bench/shapes.py", *arguments.split()])
    monkeypatch.setattr(bench_shapes, "command", lambda *_: pytest.fail("it starts"))
    assert bench_shapes.main() == 0
    assert capfd.readouterr().out.count("not run") == len(PARTS)


def test_a_file_that_was_cut_off_is_nothing(tmp_path):
    (tmp_path / "a.json").write_text('{"runs": [')
    assert read(tmp_path / "a.json") == {} == read(tmp_path / "b.json")


def test_a_part_that_does_not_end_prints_its_stacks(tmp_path, monkeypatch, capfd):
    arguments = f"--results {tmp_path} --tiny --only qwen3-0.6b-4 --minutes 0.03"
    monkeypatch.setattr(sys, "argv", ["bench/shapes.py", *arguments.split()])
    hangs = [sys.executable, "-X", "faulthandler", "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(bench_shapes, "command", lambda *_: hangs)
    assert bench_shapes.main() == 0
    assert "| qwen3-0.6b-4 |" in capfd.readouterr().out
    assert "most recent call first" in (tmp_path / "qwen3-0.6b-4.log").read_text()


def test_runs_are_written_one_by_one_and_an_engine_that_fails_is_left_out(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("cuGraphAddKernelNode: invalid argument")

    report = bench_serving.Report(str(tmp_path / "a.json"))
    args = argparse.Namespace(report=report, alone=Alone(None))
    bench = bench_serving.Bench("D", Load("one", [Wave([[1]], [2])]), args)
    engine = argparse.Namespace(name="mlx-lm 16/32")
    done = Run([0.0], [[0.1, 0.2]], [[1, 2]], [[1]], seconds=0.2)
    monkeypatch.setattr(bench_serving, "drive", lambda *_: done)
    assert bench.tried(engine)["output_tokens_per_s"] == 10
    monkeypatch.setattr(bench_serving, "drive", fails)
    assert bench.tried(engine) is None
    runs = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert [r["note"] for r in runs] == ["sweep", "failed"]
    assert runs[1]["why"].endswith("invalid argument")


def test_a_trusted_engine_uses_every_kernel_for_all_rows(monkeypatch):
    model = tiny.packed("qwen3", mx.bfloat16)
    store = PagedStore(model.packed.attention_specs, 4, 8)
    monkeypatch.setattr(decide.Trial, "problem", lambda *_: pytest.fail("a trial"))
    with trusted("varlen"):
        verdict = verdicts.verify(None)
        fusion, _ = decide.decide(model.packed, KernelAttention(store, verdict.prefill, ()))
    assert not verdict.failures
    assert fusion.skinny_rows == range(1, 65)
