"""Prefixes on their way to the disk: blocks are copied between two steps, and a thread writes them.

A step never waits for the disk, and the copies need little memory: the next blocks are copied when
the thread has written the last ones.  Until then the cache may evict the next blocks.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from vllm_metal_lite.errors import one_line
from vllm_metal_lite.prefix_disk.block_bytes import BlockBytes
from vllm_metal_lite.prefix_disk.folder import Folder
from vllm_metal_lite.prefix_disk.parts import Part, Parts

# Copies of blocks between two steps end with the one that reaches this number of bytes.
_COPIED = 16 << 20
# Prefixes that wait to be copied; further ones are dropped.
_MOST_WAITING = 16


class DiskWriter:
    """Only the engine's thread calls it.

    waiting: for each prefix, the parts that are not copied yet, and the keys of all parts.
    """

    def __init__(self, folder: Folder, parts: Parts, blocks: BlockBytes) -> None:
        self.num_bytes = 0
        self._folder, self._parts, self._blocks = folder, parts, blocks
        self.waiting: deque[tuple[deque[Part], list[bytes]]] = deque()
        self._thread = ThreadPoolExecutor(1, "prefix-disk-writer")
        self._work = self._thread.submit(self._write, [], [])

    def add(self, names: Sequence[bytes]) -> None:
        """Write a prefix, or count it as used."""
        num_tokens = len(names) * self._parts.kv.block_size
        if self._parts.are_kept(num_tokens) and len(self.waiting) < _MOST_WAITING:
            parts = deque(p for p in self._parts.of(names) if p.num_bytes)
            # A cut prefix would be of no use to a model with windows or states.
            if self._parts.may_be_cut or self._folder.can_keep(p.num_bytes for p in parts):
                self.waiting.append((parts, [part.key for part in parts]))

    @property
    def is_ready(self) -> bool:
        """Whether `copy` has something to do."""
        return bool(self.waiting) and self._work.done()

    def copy(self) -> None:
        """Copy blocks of the first prefix for the thread."""
        (parts, keys), files, num_bytes = self.waiting[0], [], 0
        if len(parts) < len(keys) and not self._work.result():
            parts.clear()
        while parts and num_bytes < _COPIED:
            part = parts.popleft()
            place = self._parts.place_of(part)
            if place is not None and part.key not in self._folder.known:
                files.append((part.key, self._blocks.read(part.group, place)))
                num_bytes += part.num_bytes
        self._work = self._thread.submit(self._write, keys, files)
        if not parts:
            self.waiting.popleft()

    def _write(self, chain: Sequence[bytes], files: Sequence[tuple[bytes, memoryview]]) -> bool:
        """Write files; returns whether the folder has them all, and so may get the next ones."""
        try:
            self._folder.refresh()
            if chain:
                self.num_bytes += self._folder.write(chain, files)
        except OSError as e:
            self._folder.warn(f"cannot write: {one_line(e)}")
            return False
        return all(key in self._folder.known for key, _ in files)

    def refresh(self) -> None:
        """Learn what other processes wrote, unless `copy` will do so."""
        if self._work.done() and not self.waiting:
            self._work = self._thread.submit(self._write, [], [])

    def flush(self, seconds: float | None = None) -> None:
        """Wait until the thread has written the copies, or for some seconds."""
        wait([self._work], seconds)
