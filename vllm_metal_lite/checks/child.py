"""The process that runs checks for `isolated.py`: a line of JSON in, a line of JSON out.

Its first line names the device.  Then it answers each {"check": ..., "timed": ...} with a result.
"""

import json
import os
import queue
import sys
import threading
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.result import CheckResult, Speed
from vllm_metal_lite.checks.run import run


def main() -> None:
    """Serve until stdin ends."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # whatever else prints must not get between the lines
        requests: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(requests,), daemon=True).start()
        mx.eval(mx.zeros(8) + 1)  # fails here, not in a check, if this process cannot compute
        reply: dict[str, Any] = {"device": backend.describe()}
        while True:
            print(json.dumps(reply), file=out, flush=True)
            request = json.loads(requests.get())
            reply = encode(run(Check.decode(request["check"]), request["timed"]))


def encode(result: CheckResult) -> dict[str, Any]:
    """A result as JSON, without its check."""
    return {**vars(result), "check": None, "speed": result.speed and vars(result.speed)}


def decode(check: Check, fields: dict[str, Any]) -> CheckResult:
    """The result of a check that `encode` was called on."""
    speed = fields["speed"]
    return CheckResult(**{**fields, "check": check, "speed": speed and Speed(**speed)})


def _read(requests: "queue.Queue[str]") -> None:
    """The parent holds the other end of stdin.  A kernel that hangs must not outlive it."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)
