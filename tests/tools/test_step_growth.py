"""A step by batch and context: real decodes over contexts that nobody computed, one CSV."""

import sys
from xml.etree import ElementTree

import pytest

from tools.bench import step_growth
from tools.bench.lib.growth_plot import Cell, write_svg
from tools.bench.lib.models import random_model
from tools.bench.lib.roofline import Rates
from tools.bench.step_growth import append, engine_of, read, seconds_of


@pytest.mark.parametrize("name", ["128x2", "qwen3-moe-tiny", "glm-tiny"])
def test_the_model_runs_decodes_alone(name):
    engine = engine_of(random_model(name), [(3, 40), (1, 100)], {})
    runner, steps = engine.pipeline.runner, []
    execute = runner.execute

    def noting(batch, *args, **kwargs):
        steps.append((batch.num_segments, batch.num_tokens, int(batch.seq_lens.min())))
        return execute(batch, *args, **kwargs)

    runner.execute = noting
    assert seconds_of(engine, 3, 40) > 0
    assert {(segments, tokens) for segments, tokens, _ in steps} == {(3, 3)}
    assert steps[0][2] == 42  # the first decode is launched beside the end of the prompts
    assert seconds_of(engine, 1, 100) > 0  # the engine is free again
    assert engine.pipeline.runner is runner


def test_cells_of_the_csv_are_not_measured_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_growth, "measured_rates", lambda: Rates(1e9, 1e9))
    monkeypatch.setattr(step_growth, "seconds_of", lambda *_, **__: 0.25)
    table, plot = tmp_path / "a.csv", tmp_path / "a.svg"
    append(table, Cell("128x2", 1, 64, 7.0, 1.0))
    words = f"--csv {table} --plot {plot} --tiny --only qwen3-4b-4 --batch 1 2 --context 64 128"
    monkeypatch.setattr(sys, "argv", ["bench/step_growth.py", *words.split()])
    for _ in range(2):
        assert step_growth.main() == 0
    cells = read(table)
    assert [(c.batch, c.context) for c in cells] == [(1, 64), (2, 64), (1, 128), (2, 128)]
    assert [c.ms for c in cells] == [7, 250, 250, 250]
    assert all(c.roofline_ms > 0 for c in cells)
    assert capsys.readouterr().out.count("| 128x2 |") == 3


def test_no_cell_starts_when_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(step_growth, "measured_rates", lambda: Rates(1e9, 1e9))
    monkeypatch.setattr(step_growth, "seconds_of", lambda *_: pytest.fail("measured"))
    words = f"--csv {tmp_path / 'a.csv'} --tiny --minutes 0"
    monkeypatch.setattr(sys, "argv", ["bench/step_growth.py", *words.split()])
    assert step_growth.main() == 0


def test_the_plot_has_a_line_a_context_and_its_roofline(tmp_path):
    cells = [Cell(m, b, c, b * c / 100, 1.0) for m in "ab" for b in (1, 4) for c in (512, 2048)]
    write_svg(cells, tmp_path / "a.svg")
    tree = ElementTree.parse(tmp_path / "a.svg")
    lines = [e for e in tree.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2 * 2 * 2
    assert sum("stroke-dasharray" in line.attrib for line in lines) == 4
