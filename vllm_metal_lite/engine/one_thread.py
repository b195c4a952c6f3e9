"""One thread at a time uses an engine, of the process that made it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_metal_lite.errors import RequestError

_process: list[int] = []  # of the first engine; a forked child inherits it


def check_process() -> None:
    """Raise RequestError in a process that was forked from one with an engine."""
    _process[1:] = [os.getpid()]
    if len(set(_process)) > 1:
        raise RequestError(
            f"process {_process[1]} was forked from {_process[0]}, which has an engine, and "
            "MLX does not survive a fork: start processes by spawn, and make an LLM in each"
        )


@contextmanager
def held(lock: threading.RLock, wait: bool = False) -> Iterator[None]:
    """Keeps other threads from an engine, whose answers they would take.

    Raises RequestError, before anything has changed, if a thread holds the lock; or waits.
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
