"""Each constant that the sweep varies has a table, whose loads run in every form."""

import pytest

from metal.host import installed
from tools.bench import tune
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
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
