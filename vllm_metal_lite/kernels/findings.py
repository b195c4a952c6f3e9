"""Findings about the kernels on this device, kept across processes."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from vllm_metal_lite import backend
from vllm_metal_lite.envs import cache_folder
from vllm_metal_lite.kernels import source


class Findings:
    """Findings for one MLX version, device and source of this package: a file for each."""

    def __init__(self) -> None:
        identity = repr([backend.mlx_version(), backend.describe(), source.digest()])
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.file = cache_folder() / f"kernels-{name}.json"
        self.known: dict[str, str] = {}
        self._read()

    def add(self, key: str, found: str) -> None:
        """Keep a finding.  If the folder is not writable, the next start finds out again."""
        self._read()
        self.known[key] = found
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, json.dumps(self.known, indent=1))

    def _read(self) -> None:
        """Add the findings of the file: other processes may have added some."""
        with suppress(OSError, TypeError, ValueError):  # no file yet, or an unreadable one
            self.known.update(json.loads(self.file.read_text(encoding="utf-8")))


def write_atomically(file: Path, text: str) -> None:
    """Write a whole file or none: another process may read it, and the disk may be full."""
    with NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as new:
        try:
            new.write(text)
            new.flush()
            os.replace(new.name, file)
        except OSError:
            os.unlink(new.name)
            raise
