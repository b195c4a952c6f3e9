"""Input and output files of `generate`."""

import json
import os
import queue
import select
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from vllm_metal_lite.cli.options import UsageError
from vllm_metal_lite.errors import MetalLiteError, one_line, shorten


def open_input(name: str) -> BinaryIO:
    """Open the input ("-": stdin); UsageError if it cannot be read."""
    try:
        # A separate file object: a thread must not hold sys.stdin when Python exits.
        return open(0 if name == "-" else name, "rb", closefd=name != "-")
    except (OSError, ValueError) as e:
        raise _unusable(name, e) from None


def count_lines(file: BinaryIO) -> int | None:
    """The number of lines that are not blank; None for a pipe, which can be read only once."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None
    try:
        start = file.tell()
        count = sum(1 for line in file if line.strip())
        file.seek(start)
    except OSError as e:
        raise _unreadable(e) from None
    return count


class LineReader:
    """Reads numbered lines ahead in a thread, so that a slow pipe does not stop the engine."""

    def __init__(self, file: BinaryIO, ahead: int) -> None:
        self._file = file
        self._queue: queue.Queue[tuple[int, bytes] | OSError | None] = queue.Queue(ahead)
        self.ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, timeout: float) -> tuple[int, bytes] | None:
        """The next line that is not blank; None on a timeout or at the end (`ended`)."""
        if self.ended:
            return None
        try:
            item = self._queue.get(timeout > 0, timeout or None)
        except queue.Empty:
            return None
        if isinstance(item, OSError):
            raise _unreadable(item)
        self.ended = item is None
        return item

    def _read(self) -> None:
        try:
            for number, line in enumerate(self._file, 1):
                if line.strip():
                    self._queue.put((number, line))
            self._queue.put(None)
        except OSError as e:
            self._queue.put(e)


class OrderedWriter:
    """Writes numbered results in the order of their numbers, each as soon as that order allows.

    Output is unbuffered, and a file never ends in a partial line, even on a full disk.
    """

    def __init__(self, name: str, input_file: BinaryIO) -> None:
        """Open the output ("-": stdout) to test for write access; `start` empties the file.

        Raises UsageError if the output cannot be written, or is the input.
        """
        self._path = None if name == "-" else Path(name)
        self._created = False
        self._next = 0
        self._waiting: dict[int, dict[str, Any]] = {}
        self._failed = False
        self.num_written = 0
        if self._path is None:
            stdout = sys.stdout.buffer
            self._file = getattr(stdout, "raw", stdout)
            return
        try:
            self._created = not self._path.exists()
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as e:
            raise _unusable(name, e) from None
        ours, theirs = (os.fstat(f.fileno()) for f in (self._file, input_file))
        if stat.S_ISREG(ours.st_mode) and os.path.samestat(ours, theirs):
            raise UsageError(f"{name} is the input: write the output to another file")

    def start(self) -> None:
        """Empty the file: results are about to come."""
        self._created = False
        if self._path is not None and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.truncate(0)

    def put(self, position: int, result: dict[str, Any]) -> None:
        """Take the result at a position (from 0, without gaps)."""
        self._waiting[position] = result
        ready = []
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._next += 1
        self._write(ready)

    def close(self) -> None:
        """Write the waiting results; remove a file that was created but never started."""
        self._write([self._waiting[position] for position in sorted(self._waiting)])
        self._waiting.clear()
        if self._path is not None:
            with suppress(OSError):  # from an earlier failed write
                self._file.close()
            if self._created:
                self._path.unlink(missing_ok=True)

    def _write(self, results: list[dict[str, Any]]) -> None:
        if self._failed:  # results after a gap would be out of order
            return
        try:
            for result in results:
                self._write_line(json.dumps(result, ensure_ascii=False).encode() + b"\n")
                self.num_written += 1
        except OSError as e:
            self._failed = True
            if isinstance(e, BrokenPipeError):
                raise
            raise MetalLiteError(f"the output cannot be written: {e.strerror}") from None

    def _write_line(self, line: bytes) -> None:
        done = 0
        try:
            while done < len(line):
                count = self._file.write(line[done:])
                if count is None:  # a pipe that does not block, and is full
                    select.select([], [self._file], [])
                done += count or 0
        except OSError:
            self._take_back(done)
            raise

    def _take_back(self, num_bytes: int) -> None:
        """Remove the last bytes written, if the output is a regular file."""
        with suppress(OSError):
            if num_bytes and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(os.lseek(self._file.fileno(), 0, os.SEEK_CUR) - num_bytes)


def _unreadable(e: OSError) -> MetalLiteError:
    return MetalLiteError(f"the input cannot be read: {e.strerror}")


def _unusable(name: str, e: OSError | ValueError) -> UsageError:
    """The error for a file that cannot be opened, or for an invalid name."""
    return UsageError(f"{shorten(name)}: {getattr(e, 'strerror', None) or one_line(e)}")
