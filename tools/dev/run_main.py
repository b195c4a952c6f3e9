"""How a tool begins and ends: its header as help, an error of ours in one line."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from vllm_metal_lite import MetalLiteError


def parser_of(header: str | None) -> argparse.ArgumentParser:
    """Its help is the header as it is."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=header, formatter_class=how)


def run_main(main: Callable[[], int]) -> NoReturn:
    """Exit with what main returns, 1 and the error, or 130."""
    try:
        sys.exit(main())
    except MetalLiteError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
