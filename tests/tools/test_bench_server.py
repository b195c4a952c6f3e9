"""The benchmark of servers, as a user runs it."""

import json
import subprocess
import sys

import pytest

from metal.host import compiler_available
from vllm_metal_lite import backend

pytestmark = pytest.mark.long


def rows_of(tmp_path, *words: str) -> list[dict]:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.server", *words, "--json", str(result)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(result.read_text())["rows"]


@pytest.mark.thorough
@pytest.mark.skipif(backend.is_cpu() and not compiler_available(), reason="no C++ compiler")
def test_both_systems_serve_all_turns_and_find_what_came_before(tmp_path):
    words = ["--model", "qwen3.5-tiny", "--scale", "0.02", "--sessions", "2", "--turns", "2"]
    rows = rows_of(tmp_path, *words, "--load", "agents", "--trusted")
    assert [row["system"] for row in rows] == ["ours", "mlx-lm"]
    for row in rows:
        assert row["done"] == row["of"] == 4
        assert row["cached %"] > 0


def test_our_server_answers_all_clients(tmp_path):
    words = ["--load", "decodes", "--scale", "0.01", "--repeats", "1", "--max-model-len", "128"]
    (row,) = rows_of(tmp_path, *words, "--systems", "ours")
    assert row["done"] == row["of"] == 32
    assert row["tokens/s"] > 0
    assert row["TTFT, ms"] > 0
