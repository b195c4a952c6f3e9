"""The tool that proves that no token changes in a pool too small for all requests."""

import importlib.util
import json

import pytest

from tools import repro_block_exhaustion
from vllm_metal_lite.errors import MetalLiteError

# Scripts read these names.
FIELDS = [
    "model",
    "engine",
    "ranks",
    "requests",
    "tokens_compared",
    "blocks_demanded",
    "blocks_in_pool",
    "blocks_peak",
    "preemptions",
    "recomputed_tokens",
    "prefix_cache_hit_tokens",
    "requests_that_differ",
    "passed",
]


@pytest.mark.parametrize("oversubscribe", ["2", "1e5"])
def test_json_is_one_object_for_scripts(run_tool, capsys, oversubscribe):
    words = f"--num-requests 4 --oversubscribe {oversubscribe} --json"
    assert run_tool(repro_block_exhaustion, words) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == FIELDS
    assert report["preemptions"] > 0
    assert (report["requests"], report["requests_that_differ"], report["passed"]) == (4, [], True)


def test_without_vllm_one_line_says_where_the_installation_stands(run_tool, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MetalLiteError, match=r"needs vLLM, which is not installed.*docs/plugin.md"):
        run_tool(repro_block_exhaustion, "--engine vllm")
