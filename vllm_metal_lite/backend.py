"""The only import of `mlx.core`: every module imports `mx` from here.

MLX's Linux wheel carries a reference BLAS that reaches a few GFLOP/s.  A system OpenBLAS or MKL
replaces it (about 25 times faster in float32), but must be loaded with global symbols BEFORE MLX.
"""

import ctypes
import os
import sys
from functools import cache
from importlib.metadata import version
from typing import Any

from vllm_metal_lite import envs

_LIBRARIES = {
    "MKL": ("libmkl_rt.so.2", "libmkl_rt.so.3", "libmkl_rt.so"),
    "OpenBLAS": ("libopenblas.so.0", "libopenblas.so"),
}


_mlx_came_first = "mlx.core" in sys.modules


def _preload_blas() -> str | None:
    """Load a fast BLAS on Linux.  Returns the library's name; None if MLX will use its own."""
    if sys.platform != "linux" or _mlx_came_first:
        return None
    for name, files in _LIBRARIES.items():
        for file in files:
            try:
                ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return name
    return None


blas = _preload_blas()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

if envs.device() == "cpu":
    mx.set_default_device(mx.cpu)


def leaves(tree: Any) -> list[Any]:
    """The leaves (arrays or None) of nested dicts, lists and tuples, such as parameters."""
    return list(dict(tree_flatten(tree)).values())


def mlx_version() -> str:
    return version("mlx")


@cache
def name() -> str:
    """MLX's backend: "metal", "cuda" or "cpu"."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def is_cpu() -> bool:
    return name() == "cpu"


def describe() -> str:
    """One line for the start-up message: the device and, on a CPU, the BLAS."""
    if not is_cpu():
        info = mx.device_info()
        return f"MLX {mlx_version()} on {info.get('device_name', name())} ({name()})"
    line = f"MLX {mlx_version()} on {os.cpu_count()} CPU cores"
    if sys.platform != "linux":
        return line
    if blas:
        return f"{line}, BLAS: {blas}"
    cure = "apt install libopenblas0-pthread"
    if _mlx_came_first:
        cure = "import vllm_metal_lite.backend before mlx"
    return f"{line}, BLAS: MLX's own (slow); OpenBLAS is about 25 times faster: {cure}"


def memory_limit() -> int:
    """Bytes available on this device: Metal's recommended working set, or all memory."""
    if is_cpu():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    info = mx.device_info()
    keys = ("max_recommended_working_set_size", "total_memory", "memory_size")  # Metal, CUDA
    return int(next(info[key] for key in keys if info.get(key)))
