"""Python in a process of its own."""

import subprocess
import sys
from typing import Any


def run_python(*words: object, **how: Any) -> subprocess.CompletedProcess:
    """Run `python WORDS`; return its output and exit code.  how: arguments of subprocess.run."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": 600, **how})
