"""The folder of the cached prefixes, which several processes share.  It has files, and no index.

A file holds one block of one KV group, or one checkpoint.  So the rules of the cache in memory
(hits, windows, least recently used) apply as they are.  The name of a file is its key, and its time
says when a request last used it.  All blocks of a chain are marked as used together.  The last one
is evicted first: a block is useless without those before it.

The quota is never exceeded.  One process at a time changes the folder, under a lock that ends with
it.  It makes room for a file before it creates the file.  So a process that is killed at any moment
leaves at most a temporary file, which the next process removes.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterable, Iterator, KeysView, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_metal_lite.prefix_disk.files import (
    HEADER,
    is_own_file,
    make_folder,
    model_of,
    read_file,
    remove,
    write_file,
)

logger = logging.getLogger(__name__)

_PAGE = 4096  # bytes; the disk stores whole pages
_NAME = re.compile("[0-9a-f]{32}")  # a file has its key as its name
_FOLDERS = "[0-9a-f][0-9a-f]"
# Seconds to wait for another process, and between two attempts.
_LONGEST_WAIT, _PAUSE = 10.0, 0.001

File = tuple[bytes, bytes | memoryview]  # the key, and what the file holds


def _size_in_quota(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


class Folder:
    """Holds files by key, at most `quota` bytes of them, temporary files included.

    model: the name that `models` shows.  Keys of different models differ already.
    Any thread may call any method.  Methods raise OSError.
    """

    # Bytes that stay free on the disk.
    free_margin = 4 << 30

    def __init__(self, path: Path, quota: int, model: str = "") -> None:
        self.path, self.quota = path, quota
        self.num_errors = 0
        self._last_warning = ""
        self._model = model
        # The files that count in the quota, by key; the least recently used one is first.
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._version: tuple[int, int] | None = None  # the folder had these sizes then
        self._last_use = 0
        self._new = path / "tmp" / "new"
        with self._locked():
            self._make_room(0)

    @property
    def known(self) -> KeysView[bytes]:
        """The keys; changes by other processes appear after `refresh`."""
        return self._sizes.keys()

    @contextmanager
    def _locked(self, changes: bool = True) -> Iterator[None]:
        """Hold the lock against other processes and threads, and know all files.

        changes: whether others must look at the files again afterwards.
        """
        tag, lock = self.path / "CACHEDIR.TAG", self.path / "lock"
        if not os.path.lexists(tag):  # the first call, or somebody removed the folder
            self.path.mkdir(0o700, parents=True, exist_ok=True)
            _keep_out_of_backups(self.path)
            tag.write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
        if os.path.lexists(lock) and not is_own_file(lock):
            remove(lock)
        try:
            fd = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o600)
            with open(fd, "wb", buffering=0):
                self._wait_for(fd)
                make_folder(self._new.parent)
                remove(self._new)  # a process that was killed may have left it
                stat = os.fstat(fd)  # its size counts changes, also on a full disk
                if (stat.st_ino, stat.st_size) != self._version:
                    self._look_at_files()
                os.truncate(fd, stat.st_size + changes)
                self._version = stat.st_ino, stat.st_size + changes
                yield
        except BaseException:
            self._version = None
            raise
        finally:
            time.sleep(2 * _PAUSE)  # or this thread could take the lock again before any that waits

    def _wait_for(self, lock: int) -> None:
        deadline = time.monotonic() + _LONGEST_WAIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another process has locked it for {_LONGEST_WAIT} s"
                    raise TimeoutError(errno.ETIMEDOUT, message, str(self.path)) from None
            time.sleep(_PAUSE)

    def _look_at_files(self) -> None:
        found = []
        for folder in self.path.glob(_FOLDERS):
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        stat = entry.stat()
                        found.append((stat.st_mtime_ns, entry.name, stat.st_size))
        found.sort()
        sizes = ((bytes.fromhex(name), _size_in_quota(size)) for _, name, size in found)
        self._sizes, self._last_use = OrderedDict(sizes), found[-1][0] if found else 0

    def refresh(self) -> None:
        """Learn what other processes wrote and removed."""
        with self._locked(changes=False):
            pass

    # Files

    def path_of(self, key: bytes) -> Path:
        return self.path / key.hex()[:2] / key.hex()

    def read(self, key: bytes) -> memoryview | None:
        """The data of a file; None if that fails.  Removes a file that is damaged or unreadable."""
        path = self.path_of(key)
        with suppress(OSError):
            return read_file(path, key)
        with self._locked():  # nobody writes or evicts the file now
            try:
                return read_file(path, key)
            except OSError as e:
                if e.errno != errno.ENOENT:  # others may have evicted a file that is missing
                    self.warn(f"cannot read {path}: {e}")
                if e.errno not in (errno.EMFILE, errno.ENFILE):  # other files are the cause
                    self._remove(key)
        return None

    def warn(self, message: str) -> None:
        """Count an error.  Log the message, unless the last message was the same."""
        self.num_errors += 1
        if message != self._last_warning:
            self._last_warning = message
            logger.warning(f"the prefix cache {message}")

    def can_keep(self, sizes: Iterable[int]) -> bool:
        """Whether the quota has room for files of these sizes, in bytes."""
        return sum(_size_in_quota(HEADER + size) for size in sizes) <= self.quota

    def write(self, chain: Sequence[bytes], files: Sequence[File]) -> int:
        """Count the files of a chain as used just now, and write some, in its order.

        Stops rather than evict files of this chain.  Returns how many bytes it wrote.
        """
        num_bytes = 0
        with self._locked():
            self._last_use = max(time.time_ns(), self._last_use) + len(chain)  # clocks may go back
            uses = {key: self._last_use - i for i, key in enumerate(chain)}
            for key in uses.keys() & self._sizes.keys():
                self._sizes.move_to_end(key)
                with suppress(FileNotFoundError):
                    os.utime(self.path_of(key), ns=(uses[key], uses[key]))
            free = shutil.disk_usage(self.path).free - self.free_margin
            for key, data in files:
                if key in self._sizes:
                    continue
                size = _size_in_quota(HEADER + len(data))
                free -= size
                if free < 0 or not self._make_room(size, uses):
                    break
                try:
                    write_file(self._new, key, self._model, data)
                    os.utime(self._new, ns=(uses[key], uses[key]))
                    path = self.path_of(key)
                    make_folder(path.parent)
                    remove(path)
                    self._new.rename(path)
                finally:
                    remove(self._new)
                self._sizes[key] = size
                num_bytes += len(data)
            for key in reversed(chain):
                if key in self._sizes:
                    self._sizes.move_to_end(key)
        return num_bytes

    def _make_room(self, size: int, kept: Container[bytes] = ()) -> bool:
        """Evict least recently used files until `size` more bytes fit, or until the next file is
        one of `kept`.  Returns whether the bytes fit."""
        left = self.quota - size - sum(self._sizes.values())
        while left < 0:
            oldest = next(iter(self._sizes), None)
            if oldest is None or oldest in kept:
                return False
            left += self._sizes[oldest]
            self._remove(oldest)
        return True

    def _remove(self, key: bytes) -> None:
        remove(self.path_of(key))
        self._sizes.pop(key, None)

    # For people

    def models(self) -> list[tuple[str, int, int]]:
        """(name, number of files, bytes in the quota) of each model, the largest first."""
        with self._locked(changes=False):
            of_model = defaultdict[str, list[int]](list)
            for key, size in self._sizes.items():
                of_model[model_of(self.path_of(key))].append(size)
        rows = [(name, len(sizes), sum(sizes)) for name, sizes in of_model.items()]
        return sorted(rows, key=lambda row: -row[2])

    def verify(self) -> tuple[int, int]:
        """Read every file; drop damaged and foreign ones.  Returns (good files, errors)."""
        self.refresh()
        before = self.num_errors
        good = sum(self.read(key) is not None for key in list(self.known))
        with self._locked():
            files = {self.path_of(key) for key in self.known}
            for file in self.path.glob(f"{_FOLDERS}/*"):
                if file not in files:
                    self.warn(f"drops {file}: it is no file of the cache")
                    remove(file)
        return good, self.num_errors - before

    def clear(self) -> None:
        """Remove all files, also foreign ones, and the index of older versions."""
        with self._locked():
            for place in "tmp", _FOLDERS, "index.db*":
                for path in self.path.glob(place):
                    remove(path)
            self._sizes.clear()


def _keep_out_of_backups(path: Path) -> None:
    """Have Time Machine skip the folder.  Spotlight skips it by its name."""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["tmutil", "addexclusion", str(path)]
            subprocess.run(command, capture_output=True, timeout=10, check=False)
