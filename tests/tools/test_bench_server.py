"""The benchmark of servers, as a user runs it: loads over HTTP, and a model that keeps states."""

import json
import subprocess
import sys

import pytest

from metal.host import compiler_available
from vllm_metal_lite import backend


def rows_of(tmp_path, *words: str) -> list[dict]:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.server", *words, "--json", str(result)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(result.read_text())["rows"]


@pytest.mark.skipif(backend.is_cpu() and not compiler_available(), reason="no C++ compiler")
def test_both_systems_serve_all_turns_and_find_what_came_before(tmp_path):
    words = ["--model", "qwen3.5-tiny", "--scale", "0.02", "--sessions", "2", "--turns", "2"]
    rows = rows_of(tmp_path, *words, "--load", "agents", "--systems", "ours,mlx-lm", "--trusted")
    assert [row["system"] for row in rows] == ["ours", "mlx-lm"]
    for row in rows:
        assert row["done"] == row["of"] == 4
        assert row["cached %"] > 0


def test_the_embedded_engine_and_our_server_make_the_same_tokens(tmp_path):
    words = ["--load", "decodes", "--scale", "0.01", "--repeats", "1", "--max-model-len", "128"]
    rows = rows_of(tmp_path, *words, "--systems", "embedded,ours")
    assert [row["system"] for row in rows] == ["embedded", "ours"]
    assert [row["done"] for row in rows] == [32, 32]
    assert all(row["tokens/s"] > 0 for row in rows)
