"""How a tool ends: an error of ours in one line, Ctrl-C without a trace."""

import sys
from collections.abc import Callable
from typing import NoReturn

from vllm_metal_lite import MetalLiteError


def run_main(main: Callable[[], int]) -> NoReturn:
    """Exit with what main returns, 1 and the error, or 130."""
    try:
        sys.exit(main())
    except MetalLiteError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
