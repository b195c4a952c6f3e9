"""Tests of the plugin under real vLLM; not collected where vLLM is not installed."""

import os
from importlib.util import find_spec

import pytest

from metal.host import installed
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.kernels.registry import Verdict

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

# Engines live in this process, where a test can look at the scheduler's blocks.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_NO_USAGE_STATS"] = "1"


@pytest.fixture
def kernels(monkeypatch):
    """Workers use the kernels, on the CPU host."""
    monkeypatch.setenv("METAL_LITE_ATTENTION", "kernels")
    monkeypatch.setattr(verdicts, "verify", lambda *_: Verdict({}, "varlen"))
    with installed():
        yield
