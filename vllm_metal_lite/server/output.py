"""The output of a server's processes: if no program reads the text, it is lost, and nothing waits.

A closed terminal or a full disk raises OSError where text is printed, in the middle of a request;
a paused terminal (Ctrl-S) lets the print wait, and with it the event loop.
"""

import io
import os
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TextIO

_MOST_TEXTS = 1000  # texts that may wait for a paused terminal; later ones are lost
_END_SECONDS = 1.0  # how long the end waits for texts that are not written yet


class _Output(io.TextIOBase):
    """Writes text to the file of a stream, on a thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._texts: queue.Queue[str | None] = queue.Queue(_MOST_TEXTS)
        self._thread = Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        with suppress(queue.Full):
            self._texts.put_nowait(text)
        return len(text)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def end(self) -> None:
        with suppress(queue.Full):
            self._texts.put_nowait(None)
        self._thread.join(_END_SECONDS)

    def _write_all(self) -> None:
        while (text := self._texts.get()) is not None:
            data = text.encode(self._stream.encoding, "backslashreplace")
            with suppress(OSError):
                while data:
                    data = data[os.write(self._stream.fileno(), data) :]


@contextmanager
def never_waiting() -> Iterator[None]:
    """Inside the block, prints to stdout and stderr neither fail nor wait."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    outputs = sys.stdout, sys.stderr = _Output(streams[0]), _Output(streams[1])
    try:
        yield
    finally:
        for output in outputs:
            output.end()
        sys.stdout, sys.stderr = streams
