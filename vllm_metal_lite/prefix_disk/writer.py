"""A thread that writes files.  What waits for it is bounded: a step never waits for the disk."""

import logging
import sqlite3
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from vllm_metal_lite.errors import one_line
from vllm_metal_lite.prefix_disk.block_file import Bytes
from vllm_metal_lite.prefix_disk.folder import Folder

logger = logging.getLogger(__name__)

# Bytes that may wait for the disk.
_MOST_WAITING = 256 << 20

Files = Sequence[tuple[bytes, Bytes]]


class Writer:
    """Writes the files of chains in order.  One thread calls it."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.num_bytes = self.num_errors = 0
        self._thread = ThreadPoolExecutor(1, "prefix-disk-writer")
        self._waiting: deque[tuple[Future[None], list[bytes], int]] = deque()  # keys, bytes
        self._chain: Sequence[bytes] = ()
        self._use = 0
        self._is_failing = False

    def waiting(self) -> set[bytes]:
        """The keys of the files that wait."""
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        return {key for _, keys, _ in self._waiting for key in keys}

    @property
    def has_room(self) -> bool:
        return sum(n for write, _, n in self._waiting if not write.done()) < _MOST_WAITING

    def add(self, chain: Sequence[bytes], files: Files) -> None:
        """Count the keys of a chain as used, and write some of its files."""
        keys, num_bytes = [key for key, _ in files], sum(len(data) for _, data in files)
        self._waiting.append((self._thread.submit(self._write, chain, files), keys, num_bytes))

    def refresh(self) -> None:
        """Learn what other processes wrote."""
        self._thread.submit(self._write, (), ())

    def _write(self, chain: Sequence[bytes], files: Files) -> None:
        try:
            self.folder.refresh()
            if chain is not self._chain and chain:
                self._use, self._chain = self.folder.use(chain), chain
            self.num_bytes += self.folder.write(files, self._use) if files else 0
            self._is_failing &= not files
        except (sqlite3.Error, OSError) as e:
            self.num_errors += 1
            if not self._is_failing:  # one line until it works again
                logger.warning(f"the prefix cache cannot write: {one_line(e)}")
            self._is_failing = True

    def flush(self, seconds: float | None = None) -> None:
        """Wait until everything is written, or for some seconds."""
        wait([write for write, *_ in self._waiting], seconds)

    def close(self) -> None:
        """Stop after the files that are being written."""
        self._thread.shutdown(cancel_futures=True)
