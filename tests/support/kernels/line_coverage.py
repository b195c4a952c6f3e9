"""A plugin of pytest that names the lines of the kernels that no test has run."""

import os
import sys

import pytest


def pytest_configure(config):
    if config.getoption("all_cases"):
        # Kernels on the CPU host count which of their lines run.
        os.environ.setdefault("METAL_LITE_HOST_COVERAGE", "1")


def pytest_sessionfinish(session):
    """Send the kernel lines that this pytest-xdist worker has run to the main process."""
    coverage = sys.modules.get("metal.host.coverage")
    if coverage and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernel_lines"] = coverage.marks()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if lines := getattr(node, "workeroutput", {}).get("kernel_lines"):
        from metal.host import coverage

        coverage.take(lines)


def pytest_terminal_summary(terminalreporter):
    """Print the lines of metal/*.metal that no test has run."""
    if coverage := sys.modules.get("metal.host.coverage"):
        for line in coverage.report():
            terminalreporter.write_line(line)
