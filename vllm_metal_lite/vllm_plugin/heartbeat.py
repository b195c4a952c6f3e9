"""Heartbeats of a model's ranks: a rank that ends or hangs ends them all.

A collective waits for a lost rank forever, or fails with a line that does not name the rank.  So
each rank increments its key in rank 0's store every second, and reads the keys of the others.  A
watchdog process beside each rank kills a rank without heartbeats: the rank hangs, or waits for the
store of a rank 0 that hangs or is unreachable.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from vllm_metal_lite.vllm_plugin import watchdog

INTERVAL = 1.0  # seconds between heartbeats
LEAVE = 3.0  # seconds that a rank waits for an orderly end before it reports a loss
MISSED = 6  # heartbeats until a rank is lost; after one more, its watchdog kills it


def _start_watchdog(seconds: int, line: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-I", "-S", watchdog.__file__, str(seconds), line]
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)


@contextmanager
def killed_after(seconds: int, line: str) -> Iterator[None]:
    """Kill this process, with a line on stderr, if the context takes longer."""
    guard = _start_watchdog(seconds, line)
    try:
        yield
    finally:
        guard.communicate()


class Heartbeat:
    """The thread that sends heartbeats of this rank, and looks for those of the others.

    names: the names of the ranks, for messages.  tcp_store: the store of the ranks.  It is kept,
    because rank 0's store ends with the object; the thread has its own client.
    lost: is called once, in the thread, with one line.
    Start it after MLX has connected the ranks: MLX holds the interpreter's lock until then.
    """

    def __init__(
        self, rank: int, names: Sequence[str], tcp_store: dist.Store, lost: Callable[[str], None]
    ) -> None:
        self._rank, self._names, self._lost = rank, names, lost
        self._tcp_store, self._client = tcp_store, tcp_store.clone()
        self._leaving, self._parent = threading.Event(), os.getppid()
        line = f"{names[rank]} has been silent for {MISSED + 1} s and is killed"
        self._watchdog = _start_watchdog(MISSED + 1, line)
        self._thread = threading.Thread(target=self._watch, name="Heartbeat", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Stop, because vLLM ends this rank and all others of its host."""
        self._leaving.set()
        self._watchdog.communicate()

    def _watch(self) -> None:
        counts, missed = [0] * len(self._names), [0] * len(self._names)
        while not self._leaving.wait(INTERVAL):
            with suppress(OSError, ValueError):  # the watchdog has ended, since this rank leaves
                self._watchdog.stdin.write(b".")  # type: ignore[union-attr]
            # vLLM does not end a worker that waits for calls of another host.
            if os.getppid() != self._parent and not self._leaving.wait(LEAVE):
                return self._lost(f"{self._names[self._rank]} has lost its vLLM process")
            before = counts
            try:
                counts = [
                    self._client.add(f"heartbeats/{rank}", int(rank == self._rank))
                    for rank in range(len(counts))
                ]
            except Exception:  # torch's stores raise several types
                if not self._leaving.wait(LEAVE):
                    self._lost(f"{self._names[0]} has ended")
                return
            # Missed heartbeats are counted, not timed: this process may have been stopped.
            for rank, count in enumerate(counts):
                missed[rank] = missed[rank] + 1 if count == before[rank] else 0
                if missed[rank] == MISSED:
                    return self._lost(
                        f"{self._names[rank]} has been silent for {MISSED} s: it has ended or "
                        "hangs, or its host is unreachable"
                    )
