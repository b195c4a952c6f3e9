"""The benchmark of agents, as a user runs it: two servers, with a model that keeps states."""

import json
import subprocess
import sys

import pytest

from metal.host import compiler_available
from vllm_metal_lite import backend

TOOL = "tools.bench.agents"


@pytest.mark.skipif(backend.is_cpu() and not compiler_available(), reason="no C++ compiler")
def test_both_systems_serve_all_turns_and_find_what_came_before(tmp_path):
    result = tmp_path / "result.json"
    words = ["--model", "qwen3.5-tiny", "--scale", "0.02", "--sessions", "2", "--turns", "2"]
    words += ["--trusted"]
    done = subprocess.run(
        [sys.executable, "-m", TOOL, *words, "--json", str(result)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(result.read_text())["rows"]
    assert [row["name"] for row in rows] == ["ours", "mlx-lm"], done.stderr[-2000:]
    for row in rows:
        assert row["turns"] == row["of"] == 4
        assert row["cached_tokens"] > 0
