"""Engines' processes are forks, as in the server's tests."""

from tests.server.conftest import engines_are_forks

__all__ = ["engines_are_forks"]
