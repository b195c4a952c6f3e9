"""The process that runs checks for `isolated.py`: pickles in, pickles out.

Its first answer names the device.  Then it answers each (check, timed) with a result.
"""

import os
import pickle
import queue
import sys
import threading
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.run import run


def main() -> None:
    """Serve until stdin ends."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever else prints must not get between the answers
        requests: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=_read, args=(requests,), daemon=True).start()
        mx.eval(mx.zeros(8) + 1)  # fails here, not in a check, if this process cannot compute
        answer: Any = backend.describe()
        while True:
            pickle.dump(answer, out)
            out.flush()
            answer = run(*requests.get())


def _read(requests: "queue.Queue[Any]") -> None:
    """The parent holds the other end of stdin.  A kernel that hangs must not outlive it."""
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)
