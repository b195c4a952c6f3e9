"""The files of the folder of cached prefixes: a header with a checksum, then the data.

The functions that make or remove a file raise OSError.
"""

import os
import shutil
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

_MAGIC = b"VMLPFX02"
# A header: these bytes, the checksum of all that follows the checksum, and the model's name.
_CHECKED, _NAME = len(_MAGIC) + 32, 128
HEADER = _CHECKED + _NAME


def write_file(path: Path, key: bytes, model: str, data: bytes | memoryview) -> None:
    """Create a file, and wait until it is on the disk."""
    name = model.encode(errors="replace")[-_NAME:].ljust(_NAME, b"\0")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(_start(key, name, data) + name)
        file.write(data)
        file.flush()
        os.fsync(fd)


def read_file(path: Path, key: bytes) -> memoryview:
    """The data of a file.  Raises OSError, whose `errno` is None for a damaged file."""
    if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO would wait for ever
        raise OSError("it is not a file")
    content = memoryview(path.read_bytes())
    if content[:_CHECKED] != _start(key, content[_CHECKED:]):
        raise OSError("its checksum is wrong")
    return content[HEADER:]


def _start(key: bytes, *checked: bytes | memoryview) -> bytes:
    # CPUs have instructions for SHA-256: twice as fast as BLAKE2b where it was timed.
    digest = sha256(key)
    for data in checked:
        digest.update(data)
    return _MAGIC + digest.digest()


def model_of(path: Path) -> str:
    """The name of the model that wrote a file; empty if the file is damaged or old."""
    with suppress(OSError), path.open("rb") as file:
        header = file.read(HEADER)
        if header.startswith(_MAGIC):
            return header[_CHECKED:].rstrip(b"\0").decode(errors="ignore")
    return ""


def is_own_file(path: Path) -> bool:
    """Whether a path is a file, and no link, that this process may read and write."""
    return stat.S_ISREG(path.lstat().st_mode) and os.access(path, os.R_OK | os.W_OK)


def make_folder(path: Path) -> None:
    """Make a folder for this user alone, also in place of something else."""
    if not path.is_dir():
        remove(path)
        path.mkdir(0o700)


def remove(path: Path) -> None:
    """Remove a file or link, or a folder and all in it.  Nothing may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
