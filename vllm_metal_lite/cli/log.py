"""The package's log on the command line: one line per warning, on stderr."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_metal_lite.cli.wrap import wrap


class _Lines(logging.Handler):
    """Prints lines such as `warning: ...` to the current sys.stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        print(wrap(line, sys.stderr), file=sys.stderr)


@contextmanager
def shown() -> Iterator[None]:
    """Show the warnings and errors that the package logs."""
    logger, handler = logging.getLogger("vllm_metal_lite"), _Lines(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
