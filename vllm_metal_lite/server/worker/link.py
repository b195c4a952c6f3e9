"""An engine's process and the pipe to it, for one event loop.

Two threads move messages through the pipe, so that the event loop never waits for the engine: the
engine's process reads only between steps, and a step of a long prompt can take seconds.
"""

import asyncio
import atexit
import logging
import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.server.worker import process

logger = logging.getLogger("vllm_metal_lite")

STOP_SECONDS = 3  # a process that should end is killed after this time


class Link:
    """Starts the process of `process.main`.

    take: a function that gets each message of the process, in the event loop.
    end: a function that is called last, in the event loop, with one line: why the process ended.
    """

    def __init__(
        self,
        name: str,
        check: EngineConfig | None,
        take: Callable[[Any], None],
        end: Callable[[str], None],
    ) -> None:
        self._take, self._end = take, end
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=process.main, args=(theirs, name, check), name=f"engine of {name}", daemon=True
        )
        with _signals_blocked():
            self._process.start()
        self.pid = self._process.pid
        # At its exit Python sends SIGTERM to processes that still run, and waits for them.
        atexit.register(self.kill)
        theirs.close()
        self._writer = threading.Thread(target=self._write, name=f"to {name}", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=f"from {name}", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue a message; never waits.  A message after the process's end is lost."""
        self._outbox.put(message)

    def kill(self) -> None:
        with suppress(ValueError):  # it has ended
            self._process.kill()

    # The methods below run on threads.

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)
        except OSError:
            pass  # the process has ended
        except Exception:
            logger.exception("a message to the engine's process cannot be sent")
            self.kill()  # otherwise later messages would wait forever

    def _read(self) -> None:
        try:
            while True:
                self._post(self._take, self._pipe.recv())
        except (EOFError, OSError):
            pass  # the process has ended
        except Exception:
            logger.exception("a message of the engine's process cannot be read")
        # Only this thread waits for the process: two would take the exit code from each other.
        self._process.join(STOP_SECONDS)
        self._process.kill()
        self._process.join()
        atexit.unregister(self.kill)
        why = _why_ended(self._process.exitcode)
        self._outbox.put(None)
        self._writer.join()
        self._pipe.close()
        self._process.close()
        self._post(self._end, why)

    def _post(self, call: Callable[[Any], None], argument: Any) -> None:
        """Call in the event loop, unless it is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, argument)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes that start here never get SIGINT and SIGTERM.

    Ctrl-C in a terminal and a service manager's SIGTERM reach all processes of the server, and the
    server decides when an engine ends.
    """
    resource_tracker.ensure_running()  # if it started later, its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _why_ended(exit_code: int | None) -> str:
    how = f"with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            how = f"by {signal.Signals(-exit_code).name}"
    return f"the engine's process has ended {how}"
