"""The folder of the cached prefixes: files, and an SQLite index that several processes share.

The quota is hard.  One process at a time changes the folder, under a lock that ends with it.  It
counts the bytes of a file before it creates the file, and removes a file before it stops counting
it.  So a process that is killed at any moment leaves fewer bytes than it counted: a temporary file,
which the next process removes, and rows without files, which are dropped when they are read.

A counter orders the uses of files, because a clock may jump.  All blocks of a chain are marked as
used together.  The last one is evicted first: a block is useless without those before it.

A file holds one block of one KV group, or one checkpoint.  So the rules of the cache in memory
(hits, windows, least recently used) apply as they are.
"""

import errno
import logging
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

logger = logging.getLogger(__name__)

_MAGIC = b"VMLPFX01"
_HEADER = len(_MAGIC) + 32
# The quota counts whole pages of the disk and a row of the index for each file.
_PAGE, _ROW = 4096, 512
_INDEX_FORMAT = 2
# Seconds to wait for another process.
_LONGEST_WAIT = 10.0

File = tuple[bytes, bytes | memoryview]  # the key, and what the file holds
# used: larger is later.  auto_vacuum: the index shrinks when files are removed.
_TABLES = f"""
PRAGMA auto_vacuum = FULL;
CREATE TABLE files (key BLOB PRIMARY KEY, model TEXT, bytes INTEGER, used INTEGER) WITHOUT ROWID;
CREATE INDEX by_use ON files (used, bytes);
PRAGMA user_version = {_INDEX_FORMAT};
"""


def write_file(path: Path, key: bytes, data: bytes | memoryview) -> None:
    """Create a file and have the disk keep it.  Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(_header(key, data))
        file.write(data)
        file.flush()
        os.fsync(fd)


def read_file(path: Path, key: bytes) -> memoryview:
    """The data of a file.  Raises OSError, without a number for a damaged file."""
    content = memoryview(path.read_bytes())
    data = content[_HEADER:]
    if content[:_HEADER] != _header(key, data):
        raise OSError("its checksum is wrong")
    return data


def _size_in_quota(num_bytes: int) -> int:
    return -(-(_HEADER + num_bytes) // _PAGE) * _PAGE + _ROW


def _header(key: bytes, data: bytes | memoryview) -> bytes:
    # CPUs have instructions for SHA-256: twice as fast as BLAKE2b where it was timed.
    digest = sha256(key)
    digest.update(data)
    return _MAGIC + digest.digest()


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
        path.mkdir(0o700, parents=True, exist_ok=True)
        tag = path / "CACHEDIR.TAG"
        if not tag.exists():
            _keep_out_of_backups(path)
            tag.write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
        (path / "tmp").mkdir(0o700, exist_ok=True)
        self._new = path / "tmp" / "new"
        self._thread_lock = threading.Lock()
        self._process_lock = self._connect("lock")  # an empty database
        with self._locked():
            self._db = self._open_index()
            with self._db:
                self._make_room(0)
        self.refresh()

    def _connect(self, name: str) -> sqlite3.Connection:
        path = self.path / name
        # `touch` opens only a new file.  If it closed one that another engine in this process uses,
        # SQLite's locks would end.
        path.touch(0o600)
        return sqlite3.connect(path, timeout=_LONGEST_WAIT, check_same_thread=False)

    def _open_index(self) -> sqlite3.Connection:
        db = self._connect("index.db")
        try:
            check = "SELECT * FROM pragma_user_version, pragma_quick_check(1)"
            found = db.execute(check).fetchone()
        except sqlite3.OperationalError:  # such as a busy index, which may be whole
            raise
        except sqlite3.DatabaseError:
            found = None
        if found == (_INDEX_FORMAT, "ok"):
            return db
        if files := self._files():
            logger.warning("the prefix cache starts empty: its index is damaged or old")
        for old in self.path / "index.db", self.path / "index.db-journal", *files:
            old.unlink(missing_ok=True)
        db = self._connect("index.db")
        db.executescript(_TABLES)
        return db

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of threads, then the lock of processes."""
        with self._thread_lock:
            try:
                self._process_lock.execute("BEGIN EXCLUSIVE")
                self._new.unlink(missing_ok=True)  # by a process that was killed
                yield
            finally:
                self._process_lock.rollback()

    def refresh(self) -> None:
        """Learn what other processes wrote and removed."""
        with self._thread_lock:
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
        with self._locked(), self._db:  # nobody writes or evicts the file now
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
        with self._locked(), self._db as db:
            (latest,) = db.execute("SELECT COALESCE(MAX(used), 0) FROM files").fetchone()
            self._uses = {key: latest + len(chain) - i for i, key in enumerate(chain)}
            rows = ((use, key) for key, use in self._uses.items())
            db.executemany("UPDATE files SET used = ? WHERE key = ?", rows)

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
            try:
                for key, data in new:
                    path = self.path_of(key)
                    path.parent.mkdir(0o700, exist_ok=True)
                    write_file(self._new, key, data)
                    self._new.rename(path)
                    self.known.add(key)
                    num_bytes += len(data)
            finally:  # after an error some are missing
                self._new.unlink(missing_ok=True)
                with self._db:
                    for key, _ in new:
                        if key not in self.known:
                            self._remove(key)
        return num_bytes

    def _reserve(self, files: Sequence[File]) -> list[File]:
        """Reserve quota for new files; returns those that fit."""
        new, first = [], min(self._uses.values())
        with self._db as db:
            free = shutil.disk_usage(self.path).free - self.free_margin
            for key, data in files:
                size = _size_in_quota(len(data))
                row = key, self._model, size, self._uses[key]
                if db.execute("SELECT 1 FROM files WHERE key = ?", (key,)).fetchone():
                    self.known.add(key)
                    continue
                free -= size
                if free < 0 or not self._make_room(size, first):
                    break
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", row)
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
        self.path_of(key).unlink(missing_ok=True)
        self.known.discard(key)
        self._db.execute("DELETE FROM files WHERE key = ?", (key,))

    # For people

    def models(self) -> list[tuple[str, int, int]]:
        """(name, number of files, bytes in the quota) of each model, the largest first."""
        with self._thread_lock:
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
                    file.unlink()
        return good, self.num_errors - before

    def clear(self) -> None:
        """Remove all files, also those that are not in the index."""
        with self._locked(), self._db:
            self._make_room(self.quota + 1)
            for file in self._files():
                file.unlink()

    def _files(self) -> list[Path]:
        return [file for file in self.path.glob("*/*") if file.is_file()]


def _keep_out_of_backups(path: Path) -> None:
    """Have Time Machine skip the folder.  Spotlight skips it by its name."""
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["tmutil", "addexclusion", str(path)]
            subprocess.run(command, capture_output=True, timeout=10, check=False)
