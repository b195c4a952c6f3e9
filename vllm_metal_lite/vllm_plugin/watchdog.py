"""A script that kills its parent process if that hangs, since another host cannot.

    python watchdog.py SECONDS LINE

It prints LINE first.  The parent process writes to this one's standard input every second.  The
script imports nothing of the package, so that its process is small.
"""

import os
import select
import signal
import sys


def watch(parent: int, seconds: int, line: str) -> None:
    """Kill `parent` after `seconds` without a heartbeat; return when it ends or closes the pipe."""
    silent = 0  # counted, not measured: all of a terminal's processes may be stopped at once
    while silent < seconds:
        if not select.select([0], [], [], 1.0)[0]:
            silent += 1
        elif os.read(0, 4096):
            silent = 0
        else:
            return
    if os.getppid() == parent:
        print(f"The engine ends: {line}", file=sys.stderr)
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles these
        signal.signal(number, signal.SIG_IGN)
    watch(os.getppid(), int(sys.argv[1]), sys.argv[2])
