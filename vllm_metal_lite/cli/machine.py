"""The facts of this machine, and the fields of a report that users share.

A report is one JSON object.  It holds no name of a user, a host or a folder.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_metal_lite import __version__, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.options import local
from vllm_metal_lite.errors import size_text
from vllm_metal_lite.model.loader import LoadedModel

SCHEMA = 1
_SECONDS = 5  # time limit of a tool of the system

Report = dict[str, Any]


def new_report(kind: str) -> Report:
    """The start of a report; kind: the command that makes it, "doctor" or "bench"."""
    return {
        "report": "vllm-metal-lite",
        "schema": SCHEMA,
        "kind": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": facts(),
    }


def facts() -> dict[str, Any]:
    """This machine: memory in bytes; gpu_cores is None if no tool of the system reports it."""
    gpu = {} if backend.is_cpu() else {"device_name": "unknown", **mx.device_info()}
    return {
        "chip": _chip(),
        "gpu": gpu.get("device_name"),
        "gpu_architecture": gpu.get("architecture"),  # such as "applegpu_g15s"
        "gpu_cores": _gpu_cores(),
        "cpu_cores": os.cpu_count(),
        "system": _system(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "usable_memory_bytes": backend.memory_limit(),
        "backend": backend.name(),
        "python": platform.python_version(),
        "mlx": backend.mlx_version(),
        "mlx_lm": version("mlx-lm"),
        "vllm_metal_lite": __version__,
    }


def describe(machine: dict[str, Any]) -> list[str]:
    """The facts in two lines for people."""
    gpu = machine["gpu"] or "no GPU in use"
    cores = f", {machine['gpu_cores']} GPU cores" if machine["gpu_cores"] else ""
    chip = machine["chip"] if machine["chip"] == gpu else f"{machine['chip']}, {gpu}"
    total, usable = map(size_text, (machine["memory_bytes"], machine["usable_memory_bytes"]))
    return [
        f"Machine:   {chip}{cores}, {machine['system']}, {total}; MLX may use "
        f"{usable} ({machine['backend']})",
        f"Versions:  vllm-metal-lite {machine['vllm_metal_lite']}, mlx {machine['mlx']}, "
        f"mlx-lm {machine['mlx_lm']}, Python {machine['python']}",
    ]


def public_name(model: str) -> str:
    """A model's name as reports give it: "demo", a Hugging Face name, or "local" for a folder."""
    return "local" if model != "demo" and local(model) is not None else model


def model_facts(name: str, model: LoadedModel) -> dict[str, Any]:
    """A model, as reports describe it; name: the user's name for it."""
    return {
        "name": public_name(name),
        "type": model.model_type,
        "parameters": model.num_parameters,
        "weight_bytes": model.weight_bytes,
        "dtype": backend.dtype_name(model.dtype),
    }


def without_names(shared: Any, model: str | None) -> Any:
    """A report, or its text, without the user's folders and the machine's name."""
    hidden = {str(Path.home()): "~"}
    if model is not None and public_name(model) == "local":
        folder = Path(model).expanduser()
        hidden = {str(folder.resolve()): "MODEL", str(folder): "MODEL", model: "MODEL", **hidden}
    hidden[platform.node()] = "HOST"
    return _replaced(shared, hidden)


def _replaced(value: Any, hidden: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for text, other in hidden.items():
            if text:
                value = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", other, value)
        return value
    if isinstance(value, dict):  # the machine stays: a host may have the name "Apple"
        return {k: v if k == "machine" else _replaced(v, hidden) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, hidden) for item in value]
    return value


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.release()}"


def _chip() -> str:
    """The processor's name, such as "Apple M3 Max"."""
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return match[1].strip()
    return platform.machine()


def _gpu_cores() -> int | None:
    if sys.platform != "darwin":
        return None
    match = re.search(r'"gpu-core-count" = (\d+)', _output("ioreg", "-rc", "AGXAccelerator"))
    return int(match[1]) if match else None


def _output(*command: str) -> str:
    """What a tool of the system prints; nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
