"""Python in a process of its own."""

import subprocess
import sys
from typing import Any


def run_python(*words: object, **how: Any) -> subprocess.CompletedProcess:
    """`python WORDS`, run to its end: what it prints, and its exit code.

    how: of subprocess.run.
    """
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": 600, **how})
