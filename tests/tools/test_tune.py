"""Each constant that the sweep varies has a table, whose loads run in every form.  Each path of
rows has a line, and takes the launches that its name says."""

import time

import pytest

from metal.host import installed
from tests.support.kernels.launches import watch
from tools.bench import tune
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.registry import name_of_launch
from vllm_metal_lite.specs import AttentionShape


@pytest.mark.parametrize("name", tune.CONSTANTS)
def test_a_row_for_each_value_and_one_for_the_present(name, capsys, monkeypatch):
    values, load, columns = tune.CONSTANTS[name]
    columns = [[max(32, n // 32) if n and n > 255 else n for n in column] for column in columns]
    monkeypatch.setitem(tune.CONSTANTS, name, (values, load, columns))
    monkeypatch.setattr(tune, "SHAPE", AttentionShape(2, 1, 16, 16, mx.bfloat16))
    monkeypatch.setattr(tune, "CHAIN", 1)
    present = getattr(profile(), name.split(":")[0])
    with installed():
        tune.sweep(name)
    _, *rows = capsys.readouterr().out.strip().splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]
    assert [row[0] for row in rows if row[0].endswith("*")] == [f"{present:,} *"]
    assert {int(row[0].rstrip(" *").replace(",", "")) for row in rows} == {*values, present}
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[1:])
    assert all(len(row) == 1 + len(columns) for row in rows)


def test_rows_have_a_line_for_each_path_and_none_after_the_deadline(capsys, monkeypatch):
    monkeypatch.setattr(tune, "CONTEXTS", ((1, 1100), (2, 40)))
    monkeypatch.setattr(tune, "ROW_FILLS", (16, 32))
    monkeypatch.setattr(tune, "CHAIN", 1)
    launched, paths = [], []
    watch(monkeypatch, lambda kernel, _, how: launched.append(name_of_launch(kernel, how)))
    real = tune.seconds

    def seconds(*args):
        launched.clear()
        found = real(*args)
        paths.append(set(launched))
        return found

    monkeypatch.setattr(tune, "seconds", seconds)
    with installed():
        tune.table_of_rows(
            AttentionShape(2, 1, 16, 16, mx.bfloat16), [1, 3], time.monotonic() + 600
        )
        lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:] if line]
        tune.table_of_rows(AttentionShape(2, 1, 16, 16, mx.bfloat16), [1, 3], 0.0)
    assert capsys.readouterr().out.strip().endswith("| --- | --- | --- | --- |")
    assert [(line[0].strip(), line[1].strip()) for line in lines[2:]] == [
        ("1", "as a decode"),
        ("3", "in splits, 16 *"),
        ("3", "in splits, 32"),
        ("3", "as decodes"),
        ("3", "as prompts"),
    ]
    assert all("(" in cell for line in lines[2:] for cell in line[2:])
    decode, merge = "paged_decode", "merge_partitions"
    assert paths[0] == {decode, merge}
    assert paths[1] == {decode}
    assert paths[2] == paths[4] == {"split_prefill", merge}
    assert paths[6] == {decode, merge}
    assert paths[8] == paths[9] == {"varlen_prefill"}
