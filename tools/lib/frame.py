"""The frame of a tool: its header is the help text, an error is one line, results are tables."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NoReturn

from vllm_metal_lite import MetalLiteError

_STARTED = time.monotonic()


def parser_of(header: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the header, unchanged."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=header, formatter_class=how)


def at_least(low: int) -> Callable[[str], int]:
    """The type of an argument: an integer of at least `low`."""

    def integer(text: str) -> int:
        if (number := int(text)) < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {number}")
        return number

    return integer


def above_zero(text: str) -> float:
    """The type of an argument: a finite number above 0."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {number:g}")
    return number


def run_main(main: Callable[[], int]) -> NoReturn:
    """Exit with main's code.  An error is printed and exits with 1; Ctrl-C exits with 130."""
    try:
        sys.exit(main())
    except (MetalLiteError, OSError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[{time.monotonic() - _STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[Sequence[object]]:
    """Print a Markdown table row by row, as the rows come.  Returns the rows."""
    printed = []
    for cells in chain([heads, ["---"] * len(heads)], rows):
        print("|", " | ".join(map(str, cells)), "|", flush=True)
        printed.append(cells)
    return printed[2:]
