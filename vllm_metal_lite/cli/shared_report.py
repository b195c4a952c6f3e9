"""A report that users share: one JSON object, without names of users, hosts and folders.

It begins with the facts of the machine.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_metal_lite import __version__, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.options import engine_flag, local
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import OutOfMemoryError, size_text
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.memory import size_store, store_bytes

_SECONDS = 5  # timeout of a system tool


def new_report(kind: str) -> dict[str, Any]:
    """The start of a report; kind: the command that makes it, "doctor" or "bench"."""
    return {
        "report": "vllm-metal-lite",
        "schema": 2,
        "kind": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
    }


def model_facts(name: str, model: LoadedModel) -> dict[str, Any]:
    """A model, as reports describe it; name: the user's name for it."""
    return {
        "name": public_name(name),
        "type": model.model_type,
        "parameters": model.num_parameters,
        "weight_bytes": model.weight_bytes,
        "dtype": backend.dtype_name(model.dtype),
    }


def public_name(model: str) -> str:
    """A model's name as reports give it: "demo", a Hugging Face name, or "local" for a folder."""
    is_hub_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) and local(model) is None
    return model if model == "demo" or is_hub_name else "local"


def without_names(shared: Any, model: str | None) -> Any:
    """A report, or its text, without the user's folders and the machine's name."""
    hidden = {str(Path.home()): "~"}
    if model is not None and public_name(model) == "local":
        folder = local(model) or Path(model)
        paths = (str(folder.resolve()), str(folder), model)
        # A bare name may be a word of the report.
        hidden = {path: "MODEL" for path in paths if "/" in path} | hidden
    hidden[platform.node()] = "HOST"
    return _replaced(shared, hidden)


def _replaced(value: Any, hidden: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for text, other in hidden.items():
            # A bare name alone is a word of the report: a host may have the name "local".
            if text and (value != text or "/" in text):
                value = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", other, value)
        return value
    if isinstance(value, dict):  # the machine stays: a host may have the name "Apple"
        return {k: v if k == "machine" else _replaced(v, hidden) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, hidden) for item in value]
    return value


def context_that_fits(
    model: LoadedModel, peak_of: Callable[[LoadedModel, EngineConfig, int], int]
) -> dict[str, Any]:
    """The context that an engine with default options has, with the weights in memory.

    peak_of: the bytes of a full step, measured or estimated.
    The result has max_model_len, the longest request here; num_tokens and kv_store_bytes count all
    requests together.  If the model does not fit, num_tokens is 0 and memory_problem says why.
    """
    config = EngineConfig()
    try:
        groups, max_model_len, _ = size_store(model, config, peak_of)
    except OutOfMemoryError as e:
        problem = e.spelled(engine_flag).removeprefix(f"{model.name} does not fit: ")
        return {"max_model_len": 0, "num_tokens": 0, "memory_problem": problem}
    return {
        "max_model_len": max_model_len,
        "num_tokens": groups[0].num_blocks * config.block_size,
        "kv_store_bytes": store_bytes(model, groups, config.block_size),
    }


# The machine


def machine_facts() -> dict[str, Any]:
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


def describe_machine(machine: dict[str, Any]) -> list[str]:
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
