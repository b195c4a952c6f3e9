"""The command `serve` in a process group of its own, as a shell or a service manager starts it."""

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.server.cli_kit import COMMAND, SAFETY

STORE = "--num-blocks", "1024", "--max-num-seqs", "8"


class Command:
    """A command that runs.  err: the file of its stderr."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], err: Path) -> None:
        self.err = err
        with err.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*COMMAND, "serve", "--port", "0", *STORE, *args],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._unread = b""

    def line(self) -> str:
        """The next line on stdout."""
        out = self._process.stdout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([out], [], [], SAFETY)
            data = out.read1() if ready else b""
            assert data, f"no line: {self.err.read_text()}"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def stop_reading(self) -> None:
        """Close our end of stdout."""
        self._process.stdout.close()

    def url(self) -> str:
        """The server's URL, once it is up."""
        return re.search(r"http://\S+", self.line())[0]

    def signal(self, number: int, group: bool = False) -> None:
        """group: to all processes of the command, as Ctrl-C in a terminal."""
        (os.killpg if group else os.kill)(self.pid, number)

    def wait_for_stderr(self, words: str) -> None:
        eventually(lambda: words in self.err.read_text())

    def leave(self) -> int:
        """Wait for the end of the command and of all its processes; returns the exit code."""
        code = self._process.wait(SAFETY)
        eventually(self._nothing_is_left)
        return code

    def _nothing_is_left(self) -> bool:
        """No process of the group runs; some may have ended, and nobody has asked for them yet."""
        listing = subprocess.run(["ps", "-A", "-o", "pgid=,state="], capture_output=True, text=True)
        lines = (line.split() for line in listing.stdout.splitlines())
        return not [pgid for pgid, state in lines if int(pgid) == self.pid and state[0] != "Z"]

    def close(self) -> None:
        """End what still runs."""
        if not self._nothing_is_left():
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def serve_command(err: Path, *args: str, env: dict[str, str] | None = None) -> Iterator[Command]:
    command = Command(args, env or {}, err)
    try:
        yield command
    finally:
        command.close()


def eventually(holds: Callable[[], Any]) -> Any:
    """Wait until something holds; returns what it gives."""
    deadline = time.monotonic() + SAFETY
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    """A process that has ended is not, even if nobody has asked for its exit code."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def wait_until_draining(client: httpx.Client) -> None:
    eventually(lambda: client.get("/health").status_code == 503)
