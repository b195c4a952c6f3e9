"""The benchmark of servers, as a user runs it."""

import json

import pytest

from tests.support.run_python import run_python


def medians_of(tmp_path, load: str, *words: str) -> dict[str, dict[str, float]]:
    result = tmp_path / "result.json"
    done = run_python("-m", "tools.bench.server", "--load", load, *words, "--json", result)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(result.read_text())["loads"][load]


@pytest.mark.long
@pytest.mark.thorough
def test_both_systems_serve_all_turns_and_find_what_came_before(tmp_path):
    words = ["--model", "qwen3.5-tiny", "--scale", "0.02", "--sessions", "2", "--turns", "2"]
    medians = medians_of(tmp_path, "sessions", *words, "--trusted")
    assert list(medians) == ["ours", "mlx-lm"]
    for metrics in medians.values():
        assert metrics["done"] == 4
        assert metrics["cached_prompt_share"] > 0


@pytest.mark.long
def test_our_server_answers_all_clients(tmp_path):
    words = ["--scale", "0.01", "--repeats", "1", "--max-model-len", "128", "--systems", "ours"]
    medians = medians_of(tmp_path, "output", *words)
    assert medians["ours"]["done"] == 32
    assert medians["ours"]["output_tokens_per_s"] > 0
    assert medians["ours"]["ttft_median"] > 0
