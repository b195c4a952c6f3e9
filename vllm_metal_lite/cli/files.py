"""The files of commands: opened, checked, read ahead of the engine, and written in order.

A bad name is refused before long work.
"""

import json
import os
import queue
import re
import shlex
import stat
import sys
import threading
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from vllm_metal_lite.cli.options import UsageError
from vllm_metal_lite.errors import MetalLiteError, RequestError, one_line, shorten, show


def open_input(name: str) -> BinaryIO:
    """Open the input ("-": stdin); UsageError if it cannot be read."""
    try:
        # A separate file object: a thread must not hold sys.stdin when Python exits.
        return open(0 if name == "-" else name, "rb", closefd=name != "-")
    except (OSError, ValueError) as e:
        raise UsageError(_why_not(name, e)) from None


def check_output(name: str, source: BinaryIO) -> None:
    """UsageError if the output ("-": stdout) cannot be written, or is the input."""
    if name == "-":
        return
    check_writable(name, replaces=True)
    if Path(name).is_file() and os.path.samestat(os.stat(name), os.fstat(source.fileno())):
        raise UsageError(f"{name} is the input: write the output to another file")


def check_writable(name: str, *, replaces: bool) -> None:
    """UsageError if a file cannot be made.

    replaces: the file may exist.  A device or a pipe, such as /dev/stdout, always may.
    """
    try:
        if not _is_special(name):
            existed = Path(name).exists()
            open(name, "ab" if replaces else "xb").close()
            if not existed:
                Path(name).resolve().unlink()  # not the link to it
    except (OSError, ValueError) as e:
        raise UsageError(_why_not(name, e)) from None


def report_text(value: Any) -> str:
    """A report as JSON.  NaN and infinities become null, because JSON lacks them."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_json(name: str, value: Any) -> None:
    """Write a report to a new file; MetalLiteError, with the reason, if that is impossible."""
    try:
        with open(name, "w" if _is_special(name) else "x", encoding="utf-8") as file:
            file.write(report_text(value) + "\n")
    except BrokenPipeError:
        raise
    except OSError as e:
        raise MetalLiteError(_why_not(name, e)) from None


def _is_special(name: str) -> bool:
    path = Path(name)
    return path.exists() and not (path.is_file() or path.is_dir())


def _why_not(name: str, e: OSError | ValueError) -> str:
    """Why a file cannot be used; ValueError: the name is not valid."""
    reason = getattr(e, "strerror", None) or one_line(e)
    if isinstance(e, FileExistsError):
        reason = "it exists, and is not overwritten: give another name"
    return f"{shorten(name)}: {reason}"


def count_lines(file: BinaryIO) -> int | None:
    """The number of lines that are not blank; None for a pipe, which can be read only once."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None
    start = file.tell()
    count = sum(1 for line in file if line.strip())
    file.seek(start)
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
        try:
            item = self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(item, OSError):
            raise MetalLiteError(f"the input cannot be read: {item.strerror}")
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

    def __init__(self, name: str) -> None:
        """Empty the file ("-": stdout)."""
        is_stdout = name == "-"
        number_or_name = sys.stdout.fileno() if is_stdout else name
        self._file = open(number_or_name, "wb", buffering=0, closefd=not is_stdout)  # noqa: SIM115
        os.set_blocking(self._file.fileno(), True)  # a full pipe makes us wait
        self._next = 0
        self._waiting: dict[int, dict[str, Any]] = {}
        self._failed = False
        self.num_written = 0

    def put(self, position: int, result: dict[str, Any]) -> None:
        """Take the result at a position (from 0, without gaps)."""
        self._waiting[position] = result
        while self._next in self._waiting:
            self._next += 1
            self._write(self._waiting.pop(self._next - 1))

    def close(self) -> None:
        """Write the waiting results."""
        for position in sorted(self._waiting):
            self._write(self._waiting[position])
        self._file.close()

    def _write(self, result: dict[str, Any]) -> None:
        if self._failed:  # results after a gap would be out of order
            return
        line, done = json.dumps(result, ensure_ascii=False).encode() + b"\n", 0
        try:
            while done < len(line):
                done += self._file.write(line[done:])
        except OSError as e:
            self._failed = True
            with suppress(OSError):  # a pipe keeps what it got
                self._file.truncate(self._file.tell() - done)
            if isinstance(e, BrokenPipeError):
                raise
            raise MetalLiteError(f"the output cannot be written: {e.strerror}") from None
        self.num_written += 1


# The largest picture file.
_MAX_BYTES = 100 << 20
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
# A word as shells read it: with quotes, or with a backslash before each space.
_WORD = re.compile(r"""((?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s\\'"])*)(.*)""", re.DOTALL)


def first_word(line: str) -> tuple[str, str]:
    """(The first word of a line without its quotes and backslashes, the rest of the line)."""
    match = _WORD.match(line)
    assert match is not None  # both parts may be empty
    word, rest = match.groups()
    return "".join(shlex.split(word)), rest.strip()


def is_dropped(line: str) -> bool:
    """Whether a line begins with the path of a picture, as terminals paste a dropped file."""
    path = first_word(line)[0]
    return path.startswith("/") and path.lower().endswith(_SUFFIXES) and os.path.isfile(path)


def read_picture(path: str) -> bytes:
    """The bytes of a file.  Raises RequestError."""
    try:
        file = Path(path).expanduser()
        if not os.path.isfile(file):
            raise RequestError(f"there is no file {show(path)}")
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise RequestError(f"{show(path)} has {size:,} bytes; the limit is {_MAX_BYTES:,}")
        return file.read_bytes()
    except (OSError, RuntimeError) as e:  # RuntimeError: ~NAME of no user
        raise RequestError(f"{show(path)} cannot be read: {e}") from None
