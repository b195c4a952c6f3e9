"""Each path has a line, and takes the launches that its name says."""

import time

from metal.host import installed
from tests.support.kernels.launches import watch
from tools.bench import rows, tune
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.registry import name_of_launch
from vllm_metal_lite.specs import AttentionShape


def test_a_line_for_each_path_and_none_after_the_deadline(capsys, monkeypatch):
    monkeypatch.setattr(rows, "LOADS", ((1, 1100), (2, 40)))
    monkeypatch.setattr(rows, "FILLS", (16, 32))
    monkeypatch.setattr(tune, "CHAIN", 1)
    launched, paths = [], []
    watch(monkeypatch, lambda kernel, _, how: launched.append(name_of_launch(kernel, how)))
    real = rows.seconds

    def seconds(*args):
        launched.clear()
        found = real(*args)
        paths.append(set(launched))
        return found

    monkeypatch.setattr(rows, "seconds", seconds)
    with installed():
        rows.table(AttentionShape(2, 1, 16, 16, mx.bfloat16), [1, 3], time.monotonic() + 600)
        lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:] if line]
        rows.table(AttentionShape(2, 1, 16, 16, mx.bfloat16), [1, 3], 0.0)
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
