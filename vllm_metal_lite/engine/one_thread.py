"""Keeps an engine to one thread at a time, in the process that made it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from vllm_metal_lite.errors import RequestError


@cache
def _first_process() -> int:
    """The process of the first engine, which a forked child inherits."""
    return os.getpid()


def check_process() -> None:
    """Raise RequestError in a process that was forked from one with an engine."""
    if (process := os.getpid()) != _first_process():
        raise RequestError(
            f"process {process} was forked from {_first_process()}, which has an engine, and "
            "MLX does not survive a fork: start processes by spawn, and make an LLM in each"
        )


@contextmanager
def held(lock: threading.RLock, wait: bool = False) -> Iterator[None]:
    """Hold an engine's lock: a second thread would take answers of the first.

    wait: whether to wait for a thread that holds the lock.  If not, raises RequestError.
    """
    check_process()
    if not lock.acquire(blocking=wait):
        raise RequestError(
            "another thread is using this LLM, and only one may at a time: give all prompts to one "
            "call, or use AsyncEngine"
        )
    try:
        yield
    finally:
        lock.release()
