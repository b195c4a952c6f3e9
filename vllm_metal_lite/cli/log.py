"""The package's log on the command line, on stderr: a line per warning, one line of progress."""

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_metal_lite.cli.wrap import wrap

_LOGGER = logging.getLogger("vllm_metal_lite")
_CLEAR = "\r\x1b[K"


class _Lines(logging.Handler):
    """Prints lines such as `warning: ...` to the current sys.stderr.

    A record that is `transient` says what the package does now.  A terminal shows it until the next
    record.  Of other information, what is `shown` is printed.
    """

    _open = False

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "transient", False):
            if sys.stderr.isatty():
                self._open = True
                text = f"{record.getMessage()} ..."[: shutil.get_terminal_size().columns - 1]
                print(_CLEAR + text, end="", file=sys.stderr, flush=True)
            return
        self.clear()
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {record.getMessage()}"
            print(wrap(line, sys.stderr), file=sys.stderr)
        elif getattr(record, "shown", False):
            print(wrap(record.getMessage(), sys.stderr), file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._open:
            self._open = False
            print(_CLEAR, end="", file=sys.stderr, flush=True)


_lines = _Lines(logging.INFO)


@contextmanager
def shown() -> Iterator[None]:
    """Show the warnings and errors that the package logs."""
    level = _LOGGER.level
    _LOGGER.addHandler(_lines)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.setLevel(level)
        _LOGGER.removeHandler(_lines)


def clear() -> None:
    """Remove the line of progress, before something else is printed."""
    _lines.clear()


@contextmanager
def progress() -> Iterator[None]:
    """The line of progress ends here."""
    try:
        yield
    finally:
        _lines.clear()
