"""The folder of the cached prefixes: files, and an SQLite index that several processes share.

The quota is hard.  One process at a time changes the folder, under a lock that ends with it.  It
counts the bytes of a file before it creates the file, and removes a file before it stops counting
it.  So a process that is killed at any moment leaves too few bytes, never too many: a temporary
file, which the next one removes, and rows without files, which are dropped when they are read.

Files are used in the order of a counter, not of a clock, which may jump.  Those of one chain of
blocks are used at once, and the last goes first: a block is useless without those before it.
"""

import fcntl
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vllm_metal_lite.prefix_disk.block_file import BadFile, Bytes, file_size, read_file, write_file

logger = logging.getLogger(__name__)

# Bytes that stay free on the disk.
FREE_MARGIN = 4 << 30
# A file takes whole pages of the disk, and a row of the index.
_PAGE, _ROW = 4096, 512
# The uses of the files of one chain differ in these bits.
_CHAIN_BITS = 20
_FORMAT = 1
_TABLES = f"""
CREATE TABLE namespaces (id INTEGER PRIMARY KEY, digest BLOB UNIQUE, model TEXT);
CREATE TABLE files (key BLOB PRIMARY KEY, namespace INTEGER, bytes INTEGER, used INTEGER)
WITHOUT ROWID;
CREATE INDEX by_use ON files (used);
CREATE TABLE totals (bytes INTEGER, uses INTEGER);
INSERT INTO totals VALUES (0, 0);
PRAGMA user_version = {_FORMAT};
"""


class ModelUsage(NamedTuple):
    """num_bytes: in the quota."""

    model: str
    num_files: int
    num_bytes: int


class Folder:
    """Files by key, at most `quota` bytes of them, temporary files and rows of the index included.

    known: the keys of one namespace; other processes change them with a delay (`refresh`).
    Any thread may call any method; sqlite3.Error and OSError pass through.
    """

    def __init__(self, path: Path, quota: int, free_margin: int | None = None) -> None:
        self.path, self.quota = path, quota
        self.free_margin = FREE_MARGIN if free_margin is None else free_margin
        self.known: set[bytes] = set()
        self.num_bad = 0
        self._namespace = 0
        self._version = -1
        if not path.exists():
            path.mkdir(0o700, parents=True, exist_ok=True)
            (path / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
            _keep_out_of_backups(path)
        (path / "tmp").mkdir(0o700, exist_ok=True)
        self._thread_lock = threading.Lock()
        self._process_lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        with self._alone():
            self._db = self._open_index()
            with self._db:
                self._make_room(0, 1 << 62)

    def _open_index(self) -> sqlite3.Connection:
        path = self.path / "index.db"
        db = self._connect(path)
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == _FORMAT:
                return db
        except sqlite3.DatabaseError as e:
            logger.warning(f"the prefix cache starts empty: its index is damaged ({e})")
        db.close()
        for old in (path, self.path / "index.db-journal", *self._files()):
            old.unlink(missing_ok=True)
        db = self._connect(path)
        db.executescript(_TABLES)
        return db

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        return sqlite3.connect(path, timeout=30, check_same_thread=False)

    def close(self) -> None:
        with self._thread_lock:
            self._db.close()
            os.close(self._process_lock)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process changes the folder meanwhile."""
        with self._thread_lock:
            fcntl.flock(self._process_lock, fcntl.LOCK_EX)
            try:
                for left in (self.path / "tmp").iterdir():  # by a process that was killed
                    left.unlink()
                yield
            finally:
                fcntl.flock(self._process_lock, fcntl.LOCK_UN)

    # Keys

    def enter_namespace(self, digest: bytes, model: str) -> None:
        """Choose the namespace of `known` and of what is written."""
        with self._alone(), self._db as db:
            values = digest, model
            db.execute("INSERT OR IGNORE INTO namespaces (digest, model) VALUES (?, ?)", values)
            row = db.execute("SELECT id FROM namespaces WHERE digest = ?", (digest,))
            (self._namespace,) = row.fetchone()
        self._version = -1
        self.refresh()

    def refresh(self) -> None:
        """Learn what other processes wrote and removed."""
        with self._thread_lock:
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                self._version = version
                of = (self._namespace,)
                rows = self._db.execute("SELECT key FROM files WHERE namespace = ?", of)
                self.known = {key for (key,) in rows}

    def use(self, keys: Sequence[bytes]) -> int:
        """Count the files of a chain as used just now; returns the number of this use."""
        with self._alone(), self._db as db:
            (use,) = db.execute("UPDATE totals SET uses = uses + 1 RETURNING uses").fetchone()
            last = (use + 1 << _CHAIN_BITS) - 1
            uses = [(last - i, key) for i, key in enumerate(keys)]
            db.executemany("UPDATE files SET used = ? WHERE key = ?", uses)
        return int(use)

    # Files

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / name

    def read(self, key: bytes, num_bytes: int | None) -> memoryview | None:
        """The num_bytes of a file (None: all); None if there is none, or a bad one, which is
        removed."""
        try:
            return read_file(self.path_of(key), key, num_bytes)
        except (BadFile, OSError) as e:
            self._drop(key, e)
            return None

    def _drop(self, key: bytes, reason: Exception) -> None:
        path = self.path_of(key)
        with self._alone(), self._db:
            if isinstance(reason, FileNotFoundError):
                if path.exists():  # another process has just written it
                    return
            else:
                self.num_bad += 1
                logger.warning(f"the prefix cache drops {path}: {reason}")
            self._remove(key)

    def write(self, files: Sequence[tuple[bytes, Bytes]], use: int) -> int:
        """Write files of one chain, in its order; returns how many bytes it wrote.

        use: of the chain.  It stops where only files of this chain could make room.
        """
        num_bytes = 0
        with self._alone():
            counted = self._count(files, use)
            try:
                for number, (key, data) in enumerate(counted):
                    new, path = self.path / "tmp" / str(number), self.path_of(key)
                    path.parent.mkdir(0o700, exist_ok=True)
                    write_file(new, key, data)
                    new.rename(path)
                    self.known.add(key)
                    num_bytes += len(data)
            except OSError:
                for left in (self.path / "tmp").iterdir():
                    left.unlink()
                with self._db:
                    for key, _ in counted:
                        if key not in self.known:
                            self._remove(key)
                raise
        return num_bytes

    def _count(
        self, files: Sequence[tuple[bytes, Bytes]], use: int
    ) -> Sequence[tuple[bytes, Bytes]]:
        """Count files that are to be written; returns those that are new and fit."""
        counted, first = [], use << _CHAIN_BITS
        with self._db as db:
            free = shutil.disk_usage(self.path).free - self.free_margin
            row = db.execute("SELECT COUNT(*) FROM files WHERE used >= ?", (first,))
            (used,) = row.fetchone()
            for key, data in files:
                if db.execute("SELECT 1 FROM files WHERE key = ?", (key,)).fetchone():
                    continue
                size = -(-file_size(len(data)) // _PAGE) * _PAGE + _ROW
                free -= size
                if free < 0 or not self._make_room(size, first):
                    break
                used += 1
                values = key, self._namespace, size, (use + 1 << _CHAIN_BITS) - used
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", values)
                db.execute("UPDATE totals SET bytes = bytes + ?", (size,))
                counted.append((key, data))
        return counted

    def _make_room(self, size: int, before: int) -> bool:
        """Remove the files used least recently, and before `before`, until `size` bytes fit."""
        (total,) = self._db.execute("SELECT bytes FROM totals").fetchone()
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
        self.path_of(key).unlink(missing_ok=True)
        self.known.discard(key)
        row = self._db.execute("DELETE FROM files WHERE key = ? RETURNING bytes", (key,)).fetchone()
        if row is not None:
            self._db.execute("UPDATE totals SET bytes = bytes - ?", row)

    # For people

    def models(self) -> list[ModelUsage]:
        """What each model takes, the largest first."""
        with self._thread_lock:
            rows = self._db.execute(
                "SELECT model, COUNT(*), SUM(bytes) AS size FROM files "
                "JOIN namespaces ON namespace = id GROUP BY id ORDER BY size DESC"
            ).fetchall()
        return [ModelUsage(*row) for row in rows]

    def verify(self) -> tuple[int, int]:
        """Read every file, and drop what is bad or foreign; returns (good, dropped)."""
        with self._thread_lock:
            keys = [key for (key,) in self._db.execute("SELECT key FROM files")]
        good = sum(self.read(key, None) is not None for key in keys)
        dropped = len(keys) - good
        with self._alone():
            names = {key.hex() for (key,) in self._db.execute("SELECT key FROM files")}
            for file in self._files():
                if file.name not in names:
                    file.unlink()
                    dropped += 1
        return good, dropped

    def clear(self) -> None:
        """Remove all files."""
        with self._alone(), self._db as db:
            for (key,) in db.execute("SELECT key FROM files").fetchall():
                self._remove(key)

    def _files(self) -> list[Path]:
        return [file for file in self.path.glob("*/*") if file.is_file()]


def _keep_out_of_backups(path: Path) -> None:
    """Have Time Machine skip the folder.  Spotlight skips it by its name."""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["tmutil", "addexclusion", str(path)]
            subprocess.run(command, capture_output=True, timeout=10, check=False)
