"""An engine serves one thread at a time, of the process that made it."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm_metal_lite.errors import RequestError

P = ParamSpec("P")
T = TypeVar("T")
_first_process: list[int] = []  # the process of the first engine; a forked child inherits it


def check_process() -> None:
    """Raise RequestError in a process that was forked from one with an engine."""
    if not _first_process:
        _first_process.append(os.getpid())
    if os.getpid() != _first_process[0]:
        raise RequestError(
            f"process {os.getpid()} was forked from {_first_process[0]}, which has an engine, and "
            "MLX does not survive a fork: start processes by spawn, and make an LLM in each"
        )


class OneThread:
    """Keeps an engine from a second thread: the answers of one would reach the other."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def held(self, wait: bool = False) -> Iterator[None]:
        """Held by the thread that uses the engine, which may hold it several times.

        Raises RequestError, before anything has changed, if another thread holds it; with `wait`
        waits for that thread.
        """
        check_process()
        if not self._lock.acquire(blocking=wait):
            raise RequestError(
                "another thread is using this LLM or engine, and only one may at a time: give all "
                "prompts to one call, or use AsyncEngine"
            )
        try:
            yield
        finally:
            self._lock.release()


def by_one_thread(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method of an engine that only the thread which holds `one_thread` may run."""

    @wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.one_thread.held():
            return method(self, *args, **kwargs)

    return guarded
