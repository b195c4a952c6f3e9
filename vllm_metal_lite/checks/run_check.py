"""Runs a check, in this process.

As a program this module serves isolated.py over a pipe; the last argument is the pipe's descriptor.
The first answer names the device.  Then each (function, arguments) is answered with a result.
"""

import os
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import speed
from vllm_metal_lite.checks.check import Check, CheckResult
from vllm_metal_lite.checks.for_model import function
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.kernels.registry import REGISTRY


def run(check: Check, timed: bool = False) -> CheckResult:
    """timed: also time the kernel, if it is correct, and its fallback."""
    row = REGISTRY[check.kernel]
    try:
        error = function(row, row.check)(check)
    except Exception as e:  # from a compiler or a driver
        return CheckResult(check, failure=one_line(e))
    result = CheckResult(check, error)
    if timed and result.passed:
        try:
            return replace(result, speed=speed.measure(check))
        except Exception:  # for example, a model has left too little memory
            return replace(result, timing_failed=True)
    return result


def main() -> None:
    """Serve until the parent is gone."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    mx.eval(mx.zeros(8) + 1)  # fails here, not in a check, if this process cannot compute
    pipe = Connection(int(sys.argv[-1]))
    pipe.send(backend.describe())
    while True:
        function, args = pipe.recv()
        pipe.send(function(*args))


def _end_with_the_parent() -> None:
    """A kernel that hangs must not outlive the parent, which holds the other end of stdin."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
