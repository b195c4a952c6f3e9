"""Agents' sessions without a server: every turn is answered, and every step is in the table."""

import sys

import pytest

from metal.host import compiler_available
from tools.bench import profile_agents
from vllm_metal_lite import backend


@pytest.mark.skipif(backend.is_cpu() and not compiler_available(), reason="no C++ compiler")
def test_all_turns_are_answered_and_all_steps_counted(monkeypatch, capsys):
    words = "--model qwen3.5-tiny --sessions 2 --turns 3 --scale 0.02"
    monkeypatch.setattr(sys, "argv", ["bench/profile_agents.py", *words.split()])
    assert profile_agents.main() == 0
    *table, counts = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in table if " | no | " in line]
    metrics = dict(part.rsplit(" ", 1) for part in counts.split(", "))
    assert sum(int(row[2]) for row in rows) == int(metrics["steps"])
    # Of each answer of four tokens the last prompt row brings the first.
    assert int(metrics["decode_tokens"]) == 2 * 3 * 3
    # Later turns start where the turn before ended, up to the model's checkpoints.
    assert int(metrics["prefix_cache_hit_tokens"].replace(",", "")) > 2 * 2 * 400
