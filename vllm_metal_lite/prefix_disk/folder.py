"""The folder of the cached prefixes: files, and an SQLite index that several processes share.

The quota is hard.  A process reserves the bytes of its files in the index before it creates them,
and removes a file before it gives up the file's bytes.  So a process that is killed at any moment
leaves too few bytes on the disk, never too many.  What it reserved is released when a process
opens the folder and finds that nobody holds the lock of the dead one.

Files are used in the order of a counter, not of a clock, which may jump.  The files of one chain of
blocks have the same use, and those at the end of the chain go first: a block is useless without
those before it.
"""

import fcntl
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vllm_metal_lite.prefix_disk.block_file import (
    BadFile,
    file_size,
    read_file,
    verify_file,
    write_file,
)

logger = logging.getLogger(__name__)

# Bytes that stay free on the disk.
FREE_MARGIN = 4 << 30
# A file takes whole pages of the disk, and a row of the index.
_PAGE, _ROW = 4096, 512
# The uses of the files of one chain differ in these bits.
_CHAIN_BITS = 20
_FORMAT = 1
_TABLES = """
CREATE TABLE namespaces (id INTEGER PRIMARY KEY, digest BLOB UNIQUE, model TEXT);
CREATE TABLE files (
    key BLOB PRIMARY KEY, namespace INTEGER, bytes INTEGER, used INTEGER, writer TEXT
) WITHOUT ROWID;
CREATE INDEX by_use ON files (used);
CREATE INDEX by_writer ON files (writer) WHERE writer IS NOT NULL;
CREATE TABLE totals (bytes INTEGER, uses INTEGER);
INSERT INTO totals VALUES (0, 0);
"""


class ModelUsage(NamedTuple):
    """model: its name.  digest: of its namespace.  num_bytes: with whole pages."""

    model: str
    digest: bytes
    num_files: int
    num_bytes: int


class Folder:
    """Files by key, at most `quota` bytes of them, temporary files and index rows included.

    known: the keys of one namespace that can be read.  Other processes change it with a delay
    (`refresh`).  Any thread may call any method; sqlite3.Error and OSError pass through.
    """

    def __init__(self, path: Path, quota: int, free_margin: int | None = None) -> None:
        self.path, self.quota = path, quota
        self.free_margin = FREE_MARGIN if free_margin is None else free_margin
        self.known: set[bytes] = set()
        self.num_evicted = self.num_bad = 0
        self._lock = threading.Lock()
        self._namespace = 0
        self._version = -1
        self._name = uuid.uuid4().hex
        if not path.exists():
            path.mkdir(0o700, parents=True)
            (path / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
            _keep_out_of_backups(path)
        for name in ("tmp", "writers"):
            (path / name).mkdir(0o700, exist_ok=True)
        self._db = self._connect()
        self._held = self._enter()

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self.path / "index.db", os.O_RDWR | os.O_CREAT, 0o600))
        return sqlite3.connect(
            self.path / "index.db", timeout=30, isolation_level=None, check_same_thread=False
        )

    def _enter(self) -> int:
        """Make or repair the index, and take this process's lock; returns its descriptor."""
        with open(self.path / "opening", "w") as opening:
            fcntl.flock(opening, fcntl.LOCK_EX)
            try:
                self._db.execute("PRAGMA quick_check(1)") if self._is_small() else None
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
            except sqlite3.DatabaseError as e:
                if isinstance(e, sqlite3.OperationalError):
                    raise
                logger.warning(f"the prefix cache starts empty: its index is damaged ({e})")
                self._db.close()
                (self.path / "index.db").unlink()
                self._db, version = self._connect(), 0
            with self._transaction():
                if version != _FORMAT:
                    self._start_empty()
                held = os.open(self.path / "writers" / self._name, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(held, fcntl.LOCK_EX)
                self._bury_the_dead()
                self._make_room(0, 1 << 62)
        return held

    def _is_small(self) -> bool:
        return (self.path / "index.db").stat().st_size < 1 << 20

    def _start_empty(self) -> None:
        for old in self._all_files():
            old.unlink(missing_ok=True)
        for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            self._db.execute(f'DROP TABLE "{name}"')
        for statement in _TABLES.split(";"):
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version = {_FORMAT}")

    def _bury_the_dead(self) -> None:
        """Release what processes reserved that are gone."""
        for file in (self.path / "writers").iterdir():
            if file.name != self._name and _is_unlocked(file):
                for left in (self.path / "tmp").glob(f"{file.name}-*"):
                    left.unlink(missing_ok=True)
                for (key,) in self._db.execute(
                    "SELECT key FROM files WHERE writer = ?", (file.name,)
                ).fetchall():
                    self._remove(key)
                file.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            self._db.close()
            (self.path / "writers" / self._name).unlink(missing_ok=True)
            os.close(self._held)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # Keys

    def enter_namespace(self, digest: bytes, model: str) -> None:
        """Choose the namespace of `known` and of what is written."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO namespaces (digest, model) VALUES (?, ?)",
                       (digest, model))  # fmt: skip
            (self._namespace,) = db.execute(
                "SELECT id FROM namespaces WHERE digest = ?", (digest,)
            ).fetchone()
        self._version = -1
        self.refresh()

    def refresh(self) -> None:
        """Learn what other processes wrote and removed."""
        with self._lock:
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return
            self._version = version
            rows = self._db.execute(
                "SELECT key FROM files WHERE namespace = ? AND writer IS NULL", (self._namespace,)
            )
            self.known = {key for (key,) in rows}

    def use(self, keys: Sequence[bytes]) -> int:
        """Count the files of a chain as used just now; returns the number of this use."""
        with self._transaction() as db:
            (use,) = db.execute("UPDATE totals SET uses = uses + 1 RETURNING uses").fetchone()
            first = (use + 1 << _CHAIN_BITS) - 1
            db.executemany(
                "UPDATE files SET used = ? WHERE key = ?",
                [(first - i, key) for i, key in enumerate(keys)],
            )
        return int(use)

    # Read and write

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / name

    def read(self, key: bytes, num_bytes: int) -> memoryview | None:
        """The bytes of a file; None if there is none, or a bad one, which is removed."""
        try:
            return read_file(self.path_of(key), key, num_bytes)
        except (BadFile, OSError) as e:
            missing = isinstance(e, FileNotFoundError)  # another process needed the room
            self.drop(key, None if missing else str(e))
            return None

    def drop(self, key: bytes, reason: str | None = None) -> None:
        """Remove a file.  reason: of a bad one."""
        if reason is not None:
            self.num_bad += 1
            logger.warning(f"the prefix cache drops {self.path_of(key)}: {reason}")
        with self._transaction():
            self._remove(key)

    def write(self, files: Sequence[tuple[bytes, bytes | bytearray | memoryview]], use: int) -> int:
        """Write files of one chain, in its order; returns how many bytes it wrote.

        use: of the chain.  It stops where only files of this chain could make room.
        """
        reserved = self._reserve([(key, len(data)) for key, data in files], use)
        of, made = dict(files), []
        try:
            for number, key in enumerate(reserved):
                path = self.path / "tmp" / f"{self._name}-{use}-{number}"
                write_file(path, key, of[key])
                made.append((key, path))
        finally:
            self._commit(made, reserved)
        return sum(len(of[key]) for key, _ in made)

    def _reserve(self, files: Sequence[tuple[bytes, int]], use: int) -> list[bytes]:
        reserved = []
        with self._transaction() as db:
            free = shutil.disk_usage(self.path).free - self.free_margin
            (count,) = db.execute(
                "SELECT COUNT(*) FROM files WHERE used >= ?", (use << _CHAIN_BITS,)
            ).fetchone()
            for i, (key, num_bytes) in enumerate(files):
                if db.execute("SELECT 1 FROM files WHERE key = ?", (key,)).fetchone():
                    continue
                size = _taken(num_bytes)
                free -= size
                if free < 0 or not self._make_room(size, use << _CHAIN_BITS):
                    break
                used = (use + 1 << _CHAIN_BITS) - 1 - count - i
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)",
                           (key, self._namespace, size, used, self._name))  # fmt: skip
                db.execute("UPDATE totals SET bytes = bytes + ?", (size,))
                reserved.append(key)
        return reserved

    def _commit(self, made: Sequence[tuple[bytes, Path]], reserved: Iterable[bytes]) -> None:
        with self._transaction() as db:
            for key, path in made:
                final = self.path_of(key)
                final.parent.mkdir(0o700, exist_ok=True)
                path.rename(final)
                db.execute("UPDATE files SET writer = NULL WHERE key = ?", (key,))
            whole = {key for key, _ in made}
            for left in (self.path / "tmp").glob(f"{self._name}-*"):
                left.unlink()
            for key in reserved:
                if key not in whole:
                    self._remove(key)
        self.known |= whole

    def _make_room(self, size: int, before: int) -> bool:
        """Remove the files used least recently, and before `before`, until `size` bytes fit."""
        (total,) = self._db.execute("SELECT bytes FROM totals").fetchone()
        while total + size > self.quota:
            oldest = self._db.execute(
                "SELECT key, bytes FROM files WHERE writer IS NULL AND used < ? "
                "ORDER BY used LIMIT 1", (before,),
            ).fetchone()  # fmt: skip
            if oldest is None:
                return False
            self._remove(oldest[0])
            self.num_evicted += 1
            total -= oldest[1]
        return True

    def _remove(self, key: bytes) -> None:
        """Remove a file, then its row; within a transaction."""
        self.path_of(key).unlink(missing_ok=True)
        self.known.discard(key)
        row = self._db.execute("DELETE FROM files WHERE key = ? RETURNING bytes", (key,)).fetchone()
        if row is not None:
            self._db.execute("UPDATE totals SET bytes = bytes - ?", row)

    # For people

    def models(self) -> list[ModelUsage]:
        """What each namespace takes."""
        with self._lock:
            rows = self._db.execute(
                "SELECT model, digest, COUNT(key), COALESCE(SUM(bytes), 0) FROM namespaces "
                "LEFT JOIN files ON namespace = id GROUP BY id ORDER BY 4 DESC"
            ).fetchall()
        return [ModelUsage(*row) for row in rows]

    def verify(self) -> tuple[int, int]:
        """Read every file and drop what is bad or foreign; returns (good, dropped)."""
        with self._lock:
            keys = [k for (k,) in self._db.execute("SELECT key FROM files WHERE writer IS NULL")]
        dropped = 0
        for key in keys:
            try:
                verify_file(self.path_of(key), key)
            except (BadFile, OSError) as e:
                self.drop(key, str(e))
                dropped += 1
        good = len(keys) - dropped
        with self._transaction() as db:  # nobody renames a file now
            names = {k.hex() for (k,) in db.execute("SELECT key FROM files")}
            for file in self._all_files():
                if file.parent.name != "tmp" and file.name not in names:
                    file.unlink(missing_ok=True)
                    dropped += 1
        return good, dropped

    def clear(self, digest: bytes | None = None) -> None:
        """Remove all files, or those of one namespace."""
        with self._transaction() as db:
            keys = db.execute(
                "SELECT key FROM files JOIN namespaces ON namespace = id "
                "WHERE writer IS NULL AND (?1 IS NULL OR digest = ?1)", (digest,),
            ).fetchall()  # fmt: skip
            for (key,) in keys:
                self._remove(key)

    def _all_files(self) -> list[Path]:
        folders = [f for f in self.path.iterdir() if f.is_dir() and f.name != "writers"]
        return [file for folder in folders for file in folder.iterdir()]


def _taken(num_bytes: int) -> int:
    """What a file counts for in the quota."""
    return -(-file_size(num_bytes) // _PAGE) * _PAGE + _ROW


def _is_unlocked(file: Path) -> bool:
    with suppress(OSError), open(file) as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _keep_out_of_backups(path: Path) -> None:
    """Have Time Machine skip the folder.  Spotlight skips it by its name."""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["tmutil", "addexclusion", str(path)]
            subprocess.run(command, capture_output=True, timeout=10, check=False)
