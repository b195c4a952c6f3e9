"""Processes that share a GPU: they warm up side by side, and each is timed alone.

Starts compile for minutes on the host, so a loan of a machine is too short for one start after the
other.  A process holds a shared lock on a file while it warms up, and the whole lock while it is
timed: it waits until every other process has come to a counted run of its own, or has ended.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Alone:
    """file: the same of all processes; None: there is no other process."""

    def __init__(self, file: Path | None) -> None:
        self._file = file.open("a") if file else None
        self._lock(fcntl.LOCK_SH)

    def _lock(self, how: int) -> None:
        if self._file:
            fcntl.flock(self._file, how)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Meanwhile no other process computes."""
        self._lock(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_SH)
