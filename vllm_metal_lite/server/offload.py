"""Threads for work that would block the event loop: parsing, templates, token ids, grammars.

Large requests have their own thread, so that small requests do not wait for them.  Clients take
turns.  When a client leaves, its work does not begin, or ends at its next `check_wanted`.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

LARGE = 1 << 17  # bytes of a request


@dataclass(frozen=True)
class Requester:
    """The request that a piece of work belongs to.

    client: the identity of its sender.  size: the size of its body in bytes.
    """

    client: Hashable = None
    size: int = 0


# The request that this task serves; `server.endpoint` sets it.
REQUESTER: ContextVar[Requester] = ContextVar("REQUESTER", default=Requester())  # noqa: B039, it is frozen


class Abandoned(Exception):
    """No caller waits for this work any longer."""


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    abandoned: bool = False


class Threads:
    """At most `most` daemon threads.  They start when needed, and keep no process from ending."""

    def __init__(self, most: int) -> None:
        self._missing = most
        self._jobs: dict[Hashable, deque[_Job]] = {}  # by client, in the order of their turns
        self._changed = threading.Condition()

    def submit(self, client: Hashable, work: Callable[[], Any]) -> _Job:
        job = _Job(work)
        with self._changed:
            self._jobs.setdefault(client, deque()).append(job)
            self._changed.notify()
            if self._missing:
                self._missing -= 1
                threading.Thread(target=self._run, name="offloaded work", daemon=True).start()
        return job

    def _next(self) -> _Job:
        """Wait for a job.  A client with further jobs moves to the end of the queue."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs)
            client = next(iter(self._jobs))
            jobs = self._jobs.pop(client)
            job = jobs.popleft()
            if jobs:
                self._jobs[client] = jobs
            return job

    def _run(self) -> None:
        while True:
            job = self._next()
            _here.job = job
            if job.result.set_running_or_notify_cancel():
                try:
                    job.result.set_result(job.work())
                except BaseException as e:
                    job.result.set_exception(e)
            del job, _here.job  # they hold the request


_here = threading.local()
_small, _large = Threads(4), Threads(1)
GRAMMARS = Threads(2)  # a hostile grammar takes seconds


async def offload(work: Callable[..., T], *args: Any, threads: Threads | None = None) -> T:
    """Run `work` on a thread.  threads: by default the size of the request selects them."""
    requester = REQUESTER.get()
    threads = threads or (_large if requester.size >= LARGE else _small)
    job = threads.submit(requester.client, partial(work, *args))
    try:
        result: T = await asyncio.wrap_future(job.result)
        return result
    finally:
        job.abandoned = True


def check_wanted() -> None:
    """Raise Abandoned if the caller of this thread's work has left."""
    job: _Job | None = getattr(_here, "job", None)
    if job is not None and job.abandoned:
        raise Abandoned
