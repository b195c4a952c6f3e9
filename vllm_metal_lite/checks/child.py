"""The process that runs checks for `isolated.py`, which it reaches by a pipe; its last argument is
the pipe's descriptor.

Its first answer names the device.  Then it answers each (check, timed) with a result.
"""

import os
import sys
import threading
from multiprocessing.connection import Connection

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.run import run


def main() -> None:
    """Serve until the parent is gone."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    mx.eval(mx.zeros(8) + 1)  # fails here, not in a check, if this process cannot compute
    pipe = Connection(int(sys.argv[-1]))
    pipe.send(backend.describe())
    while True:
        pipe.send(run(*pipe.recv()))


def _end_with_the_parent() -> None:
    """It holds the other end of stdin.  A kernel that hangs must not outlive it."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
