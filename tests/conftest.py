"""What all tests share."""

import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from zlib import crc32

# Before anything imports MLX: tests run where mlx-lm's own CPU answers are the oracle, and never
# ask a network for a model.
os.environ.setdefault("METAL_LITE_DEVICE", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
# Kernels on the CPU host count which of their lines run.
os.environ.setdefault("METAL_LITE_HOST_COVERAGE", "1")

import pytest
from hypothesis import settings

import vllm_metal_lite.backend  # noqa: F401  (loads a fast BLAS before anybody imports MLX)

# A shell that starts the tests in the background ignores Ctrl-C, and so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

TESTS = Path(__file__).parent
MANY = 6  # cases of one test function


def pytest_addoption(parser):
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="all cases of the tests in slow.txt; without it, a third of the cases of a function "
        f"that has {MANY} and more",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Marks the tests of slow.txt, and leaves out two thirds of the cases where there are many."""
    lines = (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines()
    paths = [TESTS / line for line in lines if not line.startswith("#")]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise pytest.UsageError(f"slow.txt names what is not there: {', '.join(missing)}")
    for item in items:
        if any(item.path.is_relative_to(path) for path in paths):
            item.add_marker(pytest.mark.slow)
    result = yield  # -k and -m
    if not config.getoption("all_cases"):
        left_out = two_thirds_of_many([item for item in items if item.get_closest_marker("slow")])
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]
    return result


def two_thirds_of_many(items):
    """Of each function with many cases two thirds: always the same, from all over its cases."""
    cases = defaultdict(list)
    for item in items:
        cases[item.path, item.cls, item.originalname].append(item)
    many = [some for some in cases.values() if len(some) >= MANY]
    mixed = [sorted(some, key=lambda item: crc32(item.name.encode())) for some in many]
    return [item for some in mixed for item in some[(len(some) + 2) // 3 :]]


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
