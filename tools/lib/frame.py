"""The frame of a tool: its header is the help text, an error is one line, results are tables."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NoReturn, TypeVar

from vllm_metal_lite import MetalLiteError
from vllm_metal_lite.errors import shorten, show

T = TypeVar("T", int, float)
_MOST = 1_000_000  # the largest number that a tool takes
_STARTED = time.monotonic()


def parser_of(header: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the header, unchanged."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=header, formatter_class=how)


def at_least(low: int, most: int = _MOST) -> Callable[[str], int]:
    """The type of an argument: an integer from `low` to `most`, above which a run has no end."""

    def integer(text: str) -> int:
        number = _read(text, int)
        if number < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {shorten(text)}")
        return _at_most(number, most)

    return integer


def above_zero(text: str) -> float:
    """The type of an argument: a number above 0, and no larger than a run can make use of."""
    number = _read(text, float)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {number:g}")
    return _at_most(number, _MOST)


def _read(text: str, kind: type[T]) -> T:
    try:
        return kind(text)
    except ValueError:  # no number, or too many digits
        name = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {name}, got {show(text)}") from None


def _at_most(number: T, most: int) -> T:
    if number > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, got {shorten(str(number))}")
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
