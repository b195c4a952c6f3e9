"""The facts of this machine."""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_metal_lite import __version__, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import size_text

_SECONDS = 5  # timeout of a system tool


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
    """The output of a tool of the system; "" if the tool fails."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
