"""One block of one KV group, or one checkpoint, as a file: a header and the bytes of the store.

A file holds one block, so every rule of the cache in memory (hits, windows, least recently used)
applies as it is.  A block of a 4B model has 2 MB, enough for a disk to read at full speed.

SHA-256, because CPUs have instructions for it: twice as fast as BLAKE2b where it was timed.
"""

import os
from hashlib import sha256
from pathlib import Path

_MAGIC = b"VMLPFX01"
_HEADER = len(_MAGIC) + 32

Bytes = bytes | bytearray | memoryview


class BadFile(Exception):
    """A file that is short, changed, or not what its name says."""


def file_size(num_bytes: int) -> int:
    """The size of a file that holds num_bytes."""
    return num_bytes + _HEADER


def _header(key: bytes, data: Bytes) -> bytes:
    digest = sha256(key)
    digest.update(data)
    return _MAGIC + digest.digest()


def write_file(path: Path, key: bytes, data: Bytes) -> None:
    """Create a file and have the disk keep it.  Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(_header(key, data))
        file.write(data)
        file.flush()
        os.fsync(fd)


def read_file(path: Path, key: bytes, num_bytes: int | None) -> memoryview:
    """The num_bytes of a file; None: as many as it has.  Raises BadFile, or OSError."""
    content = memoryview(path.read_bytes())
    data = content[_HEADER:]
    if num_bytes is not None and len(data) != num_bytes:
        raise BadFile("its size is wrong")
    if content[:_HEADER] != _header(key, data):
        raise BadFile("its checksum is wrong")
    return data
