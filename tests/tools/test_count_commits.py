"""tools/count_commits.py prints a row for each kind of step, and computes nothing of the model."""

import importlib.util
from pathlib import Path

from vllm_metal_lite.backend import mx

_spec = importlib.util.spec_from_file_location(
    "count_commits", Path(__file__).parents[2] / "tools" / "count_commits.py"
)
count_commits = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(count_commits)


def test_a_wider_limit_means_fewer_command_buffers(capsys):
    evaluate = mx.eval
    count_commits.main(["--store-gib", "1", "--mb", "40", "4096"])
    assert mx.eval is evaluate
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    narrow, wide = (
        [int(word) for word in row[2:5]] for row in rows if row[:2] == ["decode", "ahead"]
    )
    assert narrow[0] == wide[0] > 8 * 28
    assert narrow[2] > 2 * wide[2]
