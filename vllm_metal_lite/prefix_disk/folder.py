"""The folder of the cached prefixes: files, and an SQLite index that several processes share.

The quota is hard.  One process at a time changes the folder, under a lock that ends with it.  It
counts the bytes of a file before it creates the file, and removes a file before it stops counting
it.  So a process that is killed at any moment leaves fewer bytes than it counted: a temporary file,
which the next process removes, and rows without files, which are dropped when they are read.

A counter orders the uses of files, because a clock may jump.  All blocks of a chain are marked as
used together.  The last one is evicted first: a block is useless without those before it.

A file holds one block of one KV group, or one checkpoint.  So the rules of the cache in memory
(hits, windows, least recently used) apply as they are.

The files alone decide what can be read.  So a damaged or missing index is made again from them.
"""

import errno
import logging
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from vllm_metal_lite.prefix_disk.files import (
    HEADER,
    is_own_file,
    make_folder,
    read_file,
    remove,
    write_file,
)

logger = logging.getLogger(__name__)

# The quota counts whole pages of the disk and a row of the index for each file.
_PAGE, _ROW = 4096, 512
_NAME = re.compile("[0-9a-f]{32}")  # of a file: its key
_INDEX, _LOCK = "index.db", "lock"
# Seconds to wait for another process.
_LONGEST_WAIT = 10.0

File = tuple[bytes, bytes | memoryview]  # the key, and what the file holds
# used: larger is later.  by_use repeats most of a row, so that a check finds what is wrong there.
_TABLES = """\
CREATE TABLE files (key BLOB PRIMARY KEY, model TEXT, bytes INTEGER, used INTEGER) WITHOUT ROWID;
CREATE INDEX by_use ON files (used, bytes)"""
_CHECK = """
SELECT (SELECT group_concat(sql, ';\n') FROM sqlite_master), * FROM pragma_integrity_check(1)"""
# Errors that say nothing about a database: it is in use, or the disk or memory is full.
_PASSING = re.compile("SQLITE_(BUSY|LOCKED|PROTOCOL|NOMEM|FULL|CANTOPEN|MISUSE|IOERR(?!_READ))")


def _is_damage(error: Exception) -> bool:
    """Whether an error says that a database is damaged.  A message may quote any bytes of it."""
    name = getattr(error, "sqlite_errorname", "")
    return isinstance(error, UnicodeDecodeError) or bool(name and not _PASSING.match(name))


def _size_in_quota(num_bytes: int) -> int:
    return -(-(HEADER + num_bytes) // _PAGE) * _PAGE + _ROW


class Folder:
    """Files by key, at most `quota` bytes of them, temporary files and rows of the index included.

    model: the name that `models` shows.  Keys of different models differ already.
    known: the keys; changes by other processes appear after `refresh`.
    Any thread may call any method, but only one thread may call `use` and `write`.  Methods raise
    sqlite3.Error and OSError.
    """

    # Bytes that stay free on the disk.
    free_margin = 4 << 30

    def __init__(self, path: Path, quota: int, model: str = "") -> None:
        self.path, self.quota = path, quota
        self.known: set[bytes] = set()
        self.num_errors = 0
        self._last_warning = ""
        self._model = model[-100:]
        self._uses: dict[bytes, int] = {}  # by key, of the last chain given to `use`
        self._version = -1
        self._new = path / "tmp" / "new"
        self._thread_lock = threading.Lock()
        # `_locked` opens those of the folder.
        self._process_lock, self._db = sqlite3.connect(":memory:"), sqlite3.connect(":memory:")
        self._opened: dict[str, os.stat_result] = {}
        with self._locked():
            self._make_room(0)
        self.refresh()

    @contextmanager
    def _locked(self, processes: bool = True) -> Iterator[None]:
        """Hold the lock of threads, then the lock of processes, in a transaction of the index.

        processes: False to read nothing but the index.
        """
        with self._thread_lock:
            try:
                if processes or self._is_replaced(_INDEX):
                    self._lock_processes()
                with self._db:
                    yield
            except (sqlite3.Error, UnicodeDecodeError) as e:
                self._opened.clear()  # the next call opens both databases again
                if _is_damage(e):
                    remove(self.path / _INDEX)
                raise
            finally:
                self._process_lock.rollback()

    def _lock_processes(self) -> None:
        while True:
            if self._is_replaced(_LOCK):  # the first call, or somebody removed the folder
                self.path.mkdir(0o700, parents=True, exist_ok=True)
                tag = self.path / "CACHEDIR.TAG"
                if not os.path.lexists(tag):
                    _keep_out_of_backups(self.path)
                    tag.write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
                self._process_lock = self._connect(_LOCK, self._process_lock)
                # A full disk has no room for a journal.
                self._process_lock.execute("PRAGMA journal_mode = MEMORY")
            self._process_lock.execute("BEGIN EXCLUSIVE")
            if not self._is_replaced(_LOCK):
                break
        make_folder(self._new.parent)
        remove(self._new)  # by a process that was killed
        if self._is_replaced(_INDEX):
            self._open_index()

    def _is_replaced(self, name: str) -> bool:
        """Whether a database is no longer the one that is open, or none is open."""
        try:
            return not os.path.samestat((self.path / name).lstat(), self._opened[name])
        except (OSError, KeyError):
            return True

    def _connect(self, name: str, old: sqlite3.Connection) -> sqlite3.Connection:
        """Open a database instead of the old one.  Anything else in its place goes."""
        path = self.path / name
        for file in self.path.glob(f"{name}*"):
            if not is_own_file(file):
                remove(file)
        # `touch` opens only a new file.  If it closed one that another engine in this process uses,
        # SQLite's locks would end.
        path.touch(0o600)
        if name == _LOCK:
            os.truncate(path, 0)
        opened = path.lstat()
        db = sqlite3.connect(path, timeout=_LONGEST_WAIT, check_same_thread=False)
        db.text_factory = partial(str, encoding="utf-8", errors="replace")
        self._opened[name] = opened
        old.close()
        return db

    def _open_index(self) -> None:
        self._db, self._version = self._connect(_INDEX, self._db), -1
        try:
            if self._db.execute(_CHECK).fetchone() == (_TABLES, "ok"):
                return
        except Exception as e:
            if not _is_damage(e):
                raise
        if num_files := self._make_index():
            logger.warning(
                "the prefix cache makes its index again, which is damaged or old, and finds "
                f"{num_files:,} files; their order of use and the names of their models are lost"
            )

    def _make_index(self) -> int:
        """Make the index from the files, and remove all others; returns how many there are."""
        found = []
        for file in self._files():
            key = bytes.fromhex(file.name) if _NAME.fullmatch(file.name) else b""
            if file == self.path_of(key) and is_own_file(file):
                found.append((file.stat().st_mtime_ns, file.stat().st_size, key))
            else:
                remove(file)
        for old in self.path.glob(f"{_INDEX}*"):
            remove(old)
        self._db = self._connect(_INDEX, self._db)
        # The index shrinks when files are removed.  Older versions look for a number.
        self._db.executescript(
            f"PRAGMA auto_vacuum = FULL; BEGIN; PRAGMA user_version = 2; {_TABLES}"
        )
        for use, (_, size, key) in enumerate(sorted(found)):
            row = key, "", _size_in_quota(size - HEADER), use
            self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", row)
        self._db.commit()
        return len(found)

    def refresh(self) -> None:
        """Learn what other processes wrote and removed."""
        with self._locked(processes=False):
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                self.known = {key for (key,) in self._db.execute("SELECT key FROM files")}
                self._version = version

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

    def use(self, chain: Sequence[bytes]) -> None:
        """Count the files of a chain as used just now, also those that `write` will write."""
        with self._locked():
            (latest,) = self._db.execute("SELECT COALESCE(MAX(used), 0) FROM files").fetchone()
            self._uses = {key: latest + len(chain) - i for i, key in enumerate(chain)}
            rows = ((use, key) for key, use in self._uses.items())
            self._db.executemany("UPDATE files SET used = ? WHERE key = ?", rows)

    def can_keep(self, sizes: Iterable[int]) -> bool:
        """Whether the quota has room for files of these sizes, in bytes."""
        return sum(map(_size_in_quota, sizes)) <= self.quota

    def write(self, files: Sequence[File]) -> int:
        """Write files of the chain used last, in its order; returns how many bytes it wrote.

        Stops rather than evict files of this chain.
        """
        num_bytes = 0
        with self._locked():
            new = self._reserve(files)
            self._db.commit()
            try:
                for key, data in new:
                    path = self.path_of(key)
                    make_folder(path.parent)
                    write_file(self._new, key, data)
                    remove(path)
                    self._new.rename(path)
                    self.known.add(key)
                    num_bytes += len(data)
            finally:  # after an error some are missing
                remove(self._new)
                for key, _ in new:
                    if key not in self.known:
                        self._remove(key)
                self._db.commit()
        return num_bytes

    def _reserve(self, files: Sequence[File]) -> list[File]:
        """Reserve quota for new files; returns those that fit."""
        new, first = [], min(self._uses.values())
        free = shutil.disk_usage(self.path).free - self.free_margin
        for key, data in files:
            size = _size_in_quota(len(data))
            row = key, self._model, size, self._uses[key]
            if self._db.execute("SELECT 1 FROM files WHERE key = ?", (key,)).fetchone():
                self.known.add(key)
                continue
            free -= size
            if free < 0 or not self._make_room(size, first):
                break
            self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", row)
            new.append((key, data))
        return new

    def _make_room(self, size: int, before: float = math.inf) -> bool:
        """Evict the oldest files used before `before`.  Returns whether `size` more bytes fit."""
        (total,) = self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()
        oldest = "SELECT key, bytes FROM files WHERE used < ? ORDER BY used LIMIT 1"
        while total + size > self.quota:
            row = self._db.execute(oldest, (before,)).fetchone()
            if row is None:
                return False
            self._remove(row[0])
            total -= row[1]
        return True

    def _remove(self, key: bytes) -> None:
        """Remove a file, then its row."""
        remove(self.path_of(key))
        self.known.discard(key)
        self._db.execute("DELETE FROM files WHERE key = ?", (key,))

    # For people

    def models(self) -> list[tuple[str, int, int]]:
        """(name, number of files, bytes in the quota) of each model, the largest first."""
        with self._locked(processes=False):
            return self._db.execute(
                "SELECT model, COUNT(*), SUM(bytes) FROM files GROUP BY model ORDER BY 3 DESC"
            ).fetchall()

    def verify(self) -> tuple[int, int]:
        """Read every file; drop damaged and foreign ones.  Returns (good files, errors)."""
        self.refresh()
        before = self.num_errors
        good = sum(self.read(key) is not None for key in list(self.known))
        with self._locked():
            names = {key.hex() for (key,) in self._db.execute("SELECT key FROM files")}
            for file in self._files():
                if file.name not in names:
                    self.warn(f"drops {file}: it is not in the index")
                    remove(file)
        return good, self.num_errors - before

    def clear(self) -> None:
        """Remove all files, also those that are not in the index."""
        with self._locked():
            for place in self._new.parent, *self.path.glob("[0-9a-f][0-9a-f]"):
                remove(place)
            remove(self.path / _INDEX)
        self.refresh()

    def _files(self) -> Iterator[Path]:
        return self.path.glob("[0-9a-f][0-9a-f]/*")


def _keep_out_of_backups(path: Path) -> None:
    """Have Time Machine skip the folder.  Spotlight skips it by its name."""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["tmutil", "addexclusion", str(path)]
            subprocess.run(command, capture_output=True, timeout=10, check=False)
