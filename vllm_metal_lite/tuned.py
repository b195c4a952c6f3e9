"""The constants of devices.py that `vllm-metal-lite doctor --tune` measured on this machine.

One JSON file for each device, in the user's cache folder.  The constants affect speed, not results.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from vllm_metal_lite import backend, envs
from vllm_metal_lite.backend import mx

_SCHEMA = 1


@dataclass(frozen=True)
class Tuned:
    """constants: by the names of DeviceProfile's fields, unchecked.  day: of the measurement."""

    constants: Mapping[str, Any]
    day: str


def device() -> str:
    """The device that a file belongs to."""
    info = mx.device_info()
    size = int(info.get("memory_size") or info.get("total_memory") or 0)  # Metal, CUDA
    return f"{backend.name()}: {info.get('device_name', 'unknown')}, {size / 2**30:.0f} GiB"


def path() -> Path:
    """The file of this device, whether or not it exists."""
    name = hashlib.sha256(device().encode()).hexdigest()[:16]
    return envs.cache_folder() / f"profile-{name}.json"


def load() -> Tuned | None:
    """The constants of this device; None if they were not measured.

    Raises ValueError, with one line, if the file cannot be used.
    """
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:  # a JSON or Unicode error is a ValueError
        raise ValueError(f"it cannot be read ({type(e).__name__})") from None
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        raise ValueError("it has another form")
    here = {"device": device(), "mlx": backend.mlx_version()}
    for key, value in here.items():
        if found.get(key) != value:
            raise ValueError(f"{key} is {found.get(key)!r:.60}, here {value!r}")
    constants, day = found.get("constants"), found.get("day")
    if not isinstance(constants, dict) or not isinstance(day, str):
        raise ValueError("it has another form")
    return Tuned(constants, day[:10])


def store(constants: Mapping[str, float]) -> Path:
    """Keep the constants of this device; returns the file.  Raises OSError."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": _SCHEMA,
        "device": device(),
        "mlx": backend.mlx_version(),
        "day": date.today().isoformat(),
        "constants": dict(constants),
    }
    # Written aside first, so that another process never reads half a file.
    aside = file.with_suffix(f".{os.getpid()}")
    try:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        aside.replace(file)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    return file


def remove() -> bool:
    """Forget the constants of this device; returns whether there were any.  Raises OSError."""
    existed = path().exists()
    path().unlink(missing_ok=True)
    return existed
