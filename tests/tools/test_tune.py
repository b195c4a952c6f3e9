"""Each constant that the sweep varies has a table, whose loads run in every form."""

import pytest

from metal.host import installed
from tools.bench.tune import CONSTANTS, Loads, sweep
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.specs import AttentionShape

TINY = Loads(AttentionShape(2, 1, 16, 16, mx.bfloat16), divisor=32, chain=1)


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_row_for_each_value_and_one_for_the_present(name, capsys):
    values, _, loads = CONSTANTS[name]
    present = getattr(profile(), name.split(":")[0], 0)  # 0: a kernel without constants
    with installed():
        sweep(name, TINY)
    _, *rows = capsys.readouterr().out.strip().splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]
    assert [row[0] for row in rows if row[0].endswith("*")] == [f"{present:,} *"]
    assert {int(row[0].rstrip(" *").replace(",", "")) for row in rows} == {*values, present}
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[1:])
    assert all(len(row) == 1 + len(loads) for row in rows)
