"""Findings about the kernels on this device, kept across processes."""

import hashlib
import json
import os
from contextlib import suppress
from tempfile import NamedTemporaryFile

from vllm_metal_lite import backend
from vllm_metal_lite.kernels import source


class Remembered:
    """Findings for one MLX version, device and source of this package; any change empties them."""

    def __init__(self) -> None:
        identity = repr([backend.mlx_version(), backend.describe(), source.digest()])
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.file = source.cache_folder() / f"kernels-{name}.json"
        self.known: dict[str, str] = {}
        with suppress(OSError, TypeError, ValueError):  # no file yet, or an unreadable one
            self.known = dict(json.loads(self.file.read_text(encoding="utf-8")))

    def add(self, key: str, found: str) -> None:
        """Keep a finding.  If the folder is not writable, the next start finds out again."""
        self.known[key] = found
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: another process may read it, and the disk may be full.
            with NamedTemporaryFile(
                "w", dir=self.file.parent, encoding="utf-8", delete=False
            ) as new:
                try:
                    new.write(json.dumps(self.known, indent=1))
                    new.flush()
                    os.replace(new.name, self.file)
                except OSError:
                    os.unlink(new.name)
