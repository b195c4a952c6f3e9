"""tools/count/commits.py prints a row for each kind of step, and computes nothing of the model."""

from tools.count import commits as count_commits
from vllm_metal_lite.backend import mx


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
