"""What was found out about the kernels on this device, kept from one process to the next."""

import hashlib
import json

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import source


class Remembered:
    """By MLX version, device and kernel source: another of them, and nothing is known."""

    def __init__(self) -> None:
        texts = [source.read(kernel) for kernel in source.names()]
        identity = repr([mx.__version__, backend.describe(), texts])
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.file = source.cache_folder() / f"kernels-{name}.json"
        try:
            self.known = dict(json.loads(self.file.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError):  # none yet, or not readable: check again
            self.known = {}

    def add(self, key: str, found: str) -> None:
        self.known[key] = found
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.known, indent=1), encoding="utf-8")
        except OSError:  # a home that cannot be written to: check again next time
            return
