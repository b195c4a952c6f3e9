"""One block of one KV group, or one checkpoint, as a file: a header and the bytes of the store.

A file holds one block, so every rule of the cache in memory (hits, windows, least recently used)
applies as it is.  A block of a 4B model has 2 MB, enough for a disk to read at full speed.

SHA-256, because CPUs have instructions for it: here twice as fast as BLAKE2b.
"""

import os
from hashlib import sha256
from pathlib import Path

_MAGIC = b"VMLPFX01"
_HEADER = len(_MAGIC) + 32


class BadFile(Exception):
    """A file that is short, changed, or not what its name says."""


def file_size(num_bytes: int) -> int:
    """The size of a file that holds num_bytes."""
    return num_bytes + _HEADER


def _digest(key: bytes, data: bytes | bytearray | memoryview) -> bytes:
    digest = sha256(key)
    digest.update(data)
    return digest.digest()


def write_file(path: Path, key: bytes, data: bytes | bytearray | memoryview) -> None:
    """Create a file and have the disk keep it.  Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(_MAGIC + _digest(key, data))
        file.write(data)
        file.flush()
        os.fsync(fd)


def read_file(path: Path, key: bytes, num_bytes: int) -> memoryview:
    """The num_bytes of a file.  Raises BadFile, or OSError."""
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != file_size(num_bytes):
            raise BadFile("its size is wrong")
        content = memoryview(file.read())
    data = content[_HEADER:]
    if len(data) != num_bytes or content[:_HEADER] != _MAGIC + _digest(key, data):
        raise BadFile("its checksum is wrong")
    return data


def verify_file(path: Path, key: bytes) -> None:
    """Raises BadFile or OSError unless the file is whole."""
    read_file(path, key, path.stat().st_size - _HEADER)
