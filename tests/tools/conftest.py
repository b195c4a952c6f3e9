"""What the tests of tools share."""

import sys

import pytest


@pytest.fixture
def run_tool(monkeypatch):
    """Run the `main` of a tool's module with the words of a command line."""

    def run(tool, words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tool", *words.split()])
        return tool.main()

    return run
