"""Watches the other ranks of a model: a rank that ends or hangs ends them all.

A collective waits for a lost rank forever, or fails with a line that does not name the rank.  So
each pair of ranks keeps a connection of its own.  Each rank sends a sign of life every second: to
the others, and to a watchdog process beside it, which kills the rank if it hangs.  A rank that
leaves says so; then the others leave too.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from typing import NamedTuple

from vllm_metal_lite.errors import MetalLiteError
from vllm_metal_lite.vllm_plugin import watchdog

logger = logging.getLogger(__name__)

# Seconds between signs of life; silence after which a rank counts as lost; then, until its watchdog
# kills it; for this rank to leave after another; to connect.
INTERVAL, SILENCE, KILL, LEAVE, CONNECT = 1.0, 6.0, 1.0, 3.0, 10.0
_ALIVE, _BYE = b".", b"b"


class PeerError(MetalLiteError):
    """A rank cannot be reached."""


class Peer(NamedTuple):
    """Where a rank listens, and its process and host, for messages."""

    address: str
    port: int
    pid: int
    host: str


class Listener:
    """The socket at which this rank waits for the others.  address: an IP of this host."""

    def __init__(self, address: str) -> None:
        self.socket = socket.create_server((address, 0))
        self.peer = Peer(address, self.socket.getsockname()[1], os.getpid(), socket.gethostname())


class Peers:
    """Connections to all other ranks.

    lost: called once, in a thread of its own, with one line, when a rank ends or hangs.
    """

    def __init__(
        self, rank: int, listener: Listener, peers: Sequence[Peer], lost: Callable[[str], None]
    ) -> None:
        self.rank, self.peers, self._lost = rank, peers, lost
        self._sockets = _connect(rank, listener, peers)
        self._leaving = threading.Event()
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._parent = os.getppid()
        self._thread = threading.Thread(target=self._watch, name="Peers", daemon=True)

    def start(self) -> None:
        """Watch from now on.  Before, a rank may be silent for long: MLX connects with the
        interpreter's lock held."""
        name = f"rank {self.rank} of {len(self.peers)}"
        command = [sys.executable, "-I", "-S", watchdog.__file__, str(int(SILENCE + KILL)), name]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        self._thread.start()

    def leave(self) -> None:
        """Tell the others that this rank ends in good order."""
        self._leaving.set()
        for s in self._sockets.values():
            with suppress(OSError):
                s.send(_BYE)
        if self._watchdog is not None:
            self._watchdog.communicate()

    def _say(self) -> None:
        """Tell all that this rank lives."""
        for s in self._sockets.values():
            with suppress(OSError):  # reading tells why
                s.send(_ALIVE)
        if self._watchdog is not None and self._watchdog.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended; it is closed
                self._watchdog.stdin.write(_ALIVE)

    def _watch(self) -> None:
        selector, heard = DefaultSelector(), dict.fromkeys(self._sockets, time.monotonic())
        for rank, s in self._sockets.items():
            selector.register(s, EVENT_READ, rank)
        said = 0.0
        while not self._leaving.is_set():
            if time.monotonic() - said >= INTERVAL:
                said = time.monotonic()
                self._say()
                # vLLM does not end a worker that waits for calls of another host.
                if os.getppid() != self._parent and not self._leaving.wait(LEAVE):
                    self._report(self.rank, "has lost its vLLM process")
                    return
            for key, _ in selector.select(INTERVAL):
                rank, data = key.data, b""
                with suppress(OSError):
                    data = key.fileobj.recv(4096)  # type: ignore[union-attr]
                if _BYE in data:
                    if not self._leaving.wait(LEAVE):  # vLLM of another host was stopped
                        self._report(rank, "has left")
                    return
                if not data:
                    self._report(rank, "has ended")
                    return
                heard[rank] = time.monotonic()
            late = time.monotonic() - said > 2 * INTERVAL  # this process was stopped, or starved
            for rank, at in heard.items():
                if late:
                    heard[rank] = time.monotonic()
                elif time.monotonic() - at > SILENCE:
                    how = f"has been silent for {SILENCE:.0f} s: it hangs, or its host is away"
                    self._report(rank, how)
                    return

    def _report(self, rank: int, how: str) -> None:
        if not self._leaving.is_set():
            peer = self.peers[rank]
            self._lost(f"rank {rank} of {len(self.peers)} (pid {peer.pid} on {peer.host}) {how}")


def _connect(rank: int, listener: Listener, peers: Sequence[Peer]) -> dict[int, socket.socket]:
    """A socket for each other rank; raises PeerError that names a rank that is not there.

    Each rank calls those below it, and sends its number.
    """
    sockets: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CONNECT
    for other in range(rank):
        try:
            s = socket.create_connection(peers[other][:2], timeout=CONNECT)
        except OSError as e:
            raise PeerError(f"rank {rank} cannot reach {_name(other, peers)}: {e}") from e
        s.sendall(rank.to_bytes(4, "big"))
        sockets[other] = s
    while missing := [r for r in range(rank + 1, len(peers)) if r not in sockets]:
        listener.socket.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            s, _ = listener.socket.accept()
            s.settimeout(1.0)
            sockets[int.from_bytes(s.recv(4), "big")] = s
        except OSError as e:
            raise PeerError(
                f"rank {rank} was not called by {_name(missing[0], peers)} within {CONNECT:.0f} s"
            ) from e
    listener.socket.close()
    for s in sockets.values():
        s.settimeout(INTERVAL)
    return sockets


def _name(rank: int, peers: Sequence[Peer]) -> str:
    return f"rank {rank} ({peers[rank].host}, {peers[rank].address}:{peers[rank].port})"
