"""The only import of `mlx.core`: every module imports `mx` from here.

MLX's Linux wheel carries a reference BLAS that reaches a few GFLOP/s.  A system OpenBLAS or MKL
replaces it (about 25 times faster in float32), but must be loaded with global symbols BEFORE MLX.
"""

import ctypes
import logging
import os
import platform
import re
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_metal_lite import envs
from vllm_metal_lite.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

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
            with suppress(OSError):
                ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
                return name
    return None


blas = _preload_blas()

# MLX's own limits are 40 and 50.  3 per GiB: the results that 11 command buffers in flight hold, in
# 16 bits, stay below a sixteenth of memory (docs/kernels.md).
_MAX_MB_PER_GIB, _LEAST_MAX_MB = 3, 50


def _widen_command_buffers() -> None:
    """On a Mac with much memory, let MLX encode more into one command buffer.

    MLX charges the whole store to each launch that uses it, so it ends command buffers early.  Only
    MLX's Metal device reads the variable, when it is first used.  A value the user has set is kept.
    """
    if sys.platform != "darwin" or "MLX_MAX_MB_PER_BUFFER" in os.environ:
        return
    with suppress(OSError, ValueError):  # the size of memory is not known
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
        os.environ["MLX_MAX_MB_PER_BUFFER"] = str(max(_LEAST_MAX_MB, _MAX_MB_PER_GIB * gib))


_widen_command_buffers()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

if envs.device() == "cpu":
    mx.set_default_device(mx.cpu)


def leaves(tree: Any) -> list[Any]:
    """The leaves (arrays or None) of nested dicts, lists and tuples, such as parameters."""
    return list(dict(tree_flatten(tree)).values())


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


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


def _run_kernels_on_cuda() -> None:
    """On MLX's CUDA backend, let metal/cuda translate the kernels.  Only a checkout has it."""
    if name() != "cuda":
        return
    if (Path(__file__).parents[1] / "metal" / "cuda").is_dir():
        from metal import cuda

        cuda.install()
    elif envs.device() == "cuda":
        raise ConfigError(
            "METAL_LITE_DEVICE=cuda needs a checkout of vllm-metal-lite: an installed package has "
            "no kernels for CUDA"
        )


_run_kernels_on_cuda()


@cache
def has_neural_accelerators() -> bool:
    """Whether MLX uses the matrix units of Apple's GPUs."""
    return name() == "metal" and neural_accelerators(
        str(mx.device_info()["architecture"]), platform.mac_ver()[0]
    )


def neural_accelerators(architecture: str, macos: str) -> bool:
    """Whether MLX uses the matrix units of such a GPU: on an M5 or later, from macOS 26.2.

    MLX does not say; this follows its rule (is_nax_available in mlx/backend/metal/device.cpp).
    """
    family = re.search(r"(\d\d)([a-z])$", architecture)
    system = [int(part) for part in macos.split(".") if part.isdecimal()]
    if system[:1] == [16]:  # what a Python built for an older macOS is told
        system[0] = 26
    newest = family is not None and int(family[1]) >= (18 if family[2] == "p" else 17)
    return newest and system >= [26, 2]


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


_sharers = 1


def share_device(processes: int) -> None:
    """Say how many processes share this device's memory, this one included."""
    global _sharers
    _sharers = processes


def memory_limit() -> int:
    """The bytes that this process may use: Metal's recommended working set, or all memory, divided
    by the number of processes that share the device."""
    info = {} if is_cpu() else mx.device_info()
    keys = ("max_recommended_working_set_size", "total_memory", "memory_size")  # Metal, CUDA
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(next((info[key] for key in keys if info.get(key)), host)) // _sharers


_CPU_CACHE = 64 << 20  # with 1 GiB, steps of many sizes take as much CPU time


def set_memory_limits() -> None:
    """Limit MLX's memory and its cache of freed buffers; on Metal keep what MLX allocates resident.

    At its memory limit MLX waits for running work before it allocates more.  Its default limit (0.8
    of a CUDA device) may be less than weights and store: then MLX waits at each operation.

    The cache gets a sixteenth of memory, at least 256 MiB: a step's buffers must fit, or each step
    waits while the device frees and reallocates them, which costs a CPU nothing.  Without a wired
    limit, macOS may take weights and store out of the GPU's reach between steps.
    """
    limit = memory_limit()
    mx.set_memory_limit(limit)
    mx.set_cache_limit(_CPU_CACHE if is_cpu() else max(limit // 16, 256 << 20))
    if name() == "metal":
        try:  # MLX refuses more than the system allows, and macOS before 15 has no such limit
            mx.set_wired_limit(limit)
        except (RuntimeError, ValueError) as e:
            logger.info(f"memory is not wired: {one_line(e)}")
