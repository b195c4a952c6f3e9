"""The package's log on the command line, on stderr: a line per warning, one line of progress."""

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOGGER = logging.getLogger("vllm_metal_lite")
STOPPING = "\nStopping after the step that is under way ..."
_CLEAR = "\r\x1b[K"


class _Lines(logging.Handler):
    """Prints lines such as `warning: ...` to the current sys.stderr, and tracebacks below theirs.

    A `transient` record is a line of progress, which a terminal shows until the next record.  Other
    information is printed only if it is marked `shown`.
    """

    _open = False

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # if stderr is closed, the line is lost and the work continues
            self._show(record)

    def _show(self, record: logging.LogRecord) -> None:
        if getattr(record, "transient", False):
            if sys.stderr.isatty():
                self._open = True
                text = f"{record.getMessage()} ..."[: shutil.get_terminal_size().columns - 1]
                print(_CLEAR + text, end="", file=sys.stderr, flush=True)
        elif record.levelno >= logging.WARNING:
            say(f"{record.levelname.lower()}: {self.format(record)}")
        elif getattr(record, "shown", False):
            say(record.getMessage())
        else:
            self.clear()

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._open:
            self._open = False
            print(_CLEAR, end="", file=sys.stderr, flush=True)


_lines = _Lines(logging.INFO)
# Removes the line of progress before something is printed to stdout.
clear = _lines.clear


def say(text: str, style: str = "{}") -> None:
    """Print text for people in place of the line of progress.

    style: a format; {} is the text.
    """
    clear()
    print(style.format(text), file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """Show the present work until something else is shown."""
    _LOGGER.info(text, extra={"transient": True})


@contextmanager
def shown() -> Iterator[None]:
    """Show the warnings and errors that the package logs; the line of progress ends here."""
    level = _LOGGER.level
    _LOGGER.addHandler(_lines)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        clear()
        _LOGGER.setLevel(level)
        _LOGGER.removeHandler(_lines)
