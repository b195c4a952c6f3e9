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
from vllm_metal_lite.checks.for_model import check_of
from vllm_metal_lite.errors import one_line, our_fault
from vllm_metal_lite.kernels.launch import is_of_device
from vllm_metal_lite.kernels.registry import REGISTRY


def run(check: Check, timed: bool = False) -> CheckResult:
    """timed: also time the kernel, if it is correct, and its fallback.

    An error of this package's own code is a failure that says so.
    """
    result = CheckResult(check)
    try:
        result = replace(result, error=check_of(REGISTRY[check.kernel])(check))
        if timed and result.passed:
            result = replace(result, speed=speed.measure(check))
    except Exception as e:
        if not is_of_device(e):
            return replace(result, failure=our_fault(e))
        if result.passed:  # the timing failed: for example, a model has left too little memory
            return replace(result, timing_failed=True)
        return replace(result, failure=one_line(e))
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
