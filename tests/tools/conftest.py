"""Runs a tool as its command line does."""

import sys

import pytest


@pytest.fixture
def run_tool(monkeypatch):
    """Runs a tool's `main` with these words as its arguments."""

    def run(tool, words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tool", *words.split()])
        return tool.main()

    return run
