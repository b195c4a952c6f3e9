"""A thread that writes files.  Its queue is bounded: a step never waits for the disk."""

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence

from vllm_metal_lite.errors import one_line
from vllm_metal_lite.prefix_disk.folder import Folder

logger = logging.getLogger(__name__)

# Bytes that may wait for the disk.
_MOST_WAITING = 256 << 20
# Seconds after which the files of other processes are known.
_REFRESH = 5.0
# Errors in a row after which nothing is written any more.
_MOST_ERRORS = 8

File = tuple[bytes, bytearray]


class Writer:
    """Writes the files of chains in order.  num_bytes: written so far."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.num_bytes = self.num_errors = 0
        self._waiting: deque[tuple[Sequence[bytes], Sequence[File]]] = deque()
        self._waiting_bytes = 0
        self.keys: set[bytes] = set()  # of the files that wait
        self._changed = threading.Condition()
        self._closed = self._busy = False
        self._errors_in_a_row = 0
        self._chain: Sequence[bytes] = ()
        self._use = 0
        self._thread = threading.Thread(target=self._run, name="prefix-disk", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        return self._waiting_bytes < _MOST_WAITING and self._errors_in_a_row < _MOST_ERRORS

    def add(self, chain: Sequence[bytes], files: Sequence[File]) -> None:
        """Count the keys of a chain as used, and write some of its files."""
        with self._changed:
            self._waiting.append((chain, files))
            self._waiting_bytes += sum(len(data) for _, data in files)
            self.keys.update(key for key, _ in files)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def close(self) -> None:
        """Stop after the file that is being written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed, _REFRESH)
                if self._closed:
                    return
                chain, files = self._waiting.popleft() if self._waiting else ((), ())
                self._busy = True
            try:
                self._take(chain, files)
                if files:
                    self._errors_in_a_row = 0
            except (sqlite3.Error, OSError) as e:
                self._failed(e)
            with self._changed:
                self._busy = False
                self._waiting_bytes -= sum(len(data) for _, data in files)
                self.keys.difference_update(key for key, _ in files)
                self._changed.notify_all()

    def _take(self, chain: Sequence[bytes], files: Sequence[File]) -> None:
        if not chain:
            self.folder.refresh()
            return
        if chain is not self._chain:
            self._use, self._chain = self.folder.use(chain), chain
        self.num_bytes += self.folder.write(files, self._use)

    def _failed(self, e: Exception) -> None:
        self.num_errors += 1
        self._errors_in_a_row += 1
        if self._errors_in_a_row in (1, _MOST_ERRORS):
            ends = self._errors_in_a_row == _MOST_ERRORS
            logger.warning(
                f"the prefix cache cannot write: {one_line(e)}{'; it gives up' if ends else ''}"
            )
