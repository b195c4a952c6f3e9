"""What all tests share."""

import os
import sys

# Before anything imports MLX: tests run where mlx-lm's own CPU answers are the oracle, and never
# ask a network for a model.
os.environ.setdefault("METAL_LITE_DEVICE", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
# Kernels on the CPU host count which of their lines run.
os.environ.setdefault("METAL_LITE_HOST_COVERAGE", "1")

import pytest
from hypothesis import settings

import vllm_metal_lite.backend  # noqa: F401  (loads a fast BLAS before anybody imports MLX)

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands over which lines of kernels it has run."""
    coverage = sys.modules.get("metal.host.coverage")
    if coverage and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernel_lines"] = coverage.marks()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if lines := getattr(node, "workeroutput", {}).get("kernel_lines"):
        from metal.host import coverage

        coverage.take(lines)


def pytest_terminal_summary(terminalreporter):
    """Names the lines of metal/*.metal that no test has run."""
    if coverage := sys.modules.get("metal.host.coverage"):
        for line in coverage.report():
            terminalreporter.write_line(line)
