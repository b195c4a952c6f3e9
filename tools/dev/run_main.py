"""The frame of a tool: its header is the help text, and an error of ours is one line."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from vllm_metal_lite import MetalLiteError


def parser_of(header: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the header, unchanged."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=header, formatter_class=how)


def run_main(main: Callable[[], int]) -> NoReturn:
    """Exit with main's code; with 1 after an error, which is printed; with 130 after Ctrl-C."""
    try:
        sys.exit(main())
    except MetalLiteError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
