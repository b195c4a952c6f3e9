"""Converts a kernel's text from Metal to CUDA, by replacements.

They suffice for the part of MSL that kernels use ("Portable text" in docs/kernels.md) and shim.h.
"""

import hashlib
import os
import re
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

# The backend imports this package, so nothing here may import the backend.
from vllm_metal_lite.envs import cache_folder

# Metal's index variables from CUDA's; `mx.fast.cuda_kernel` declares none.
_CUDA_INDICES = """\
const uint3 thread_position_in_threadgroup = threadIdx;
const uint3 threadgroup_position_in_grid = blockIdx;
const uint3 threadgroups_per_grid = make_uint3(gridDim.x, gridDim.y, gridDim.z);
const uint3 thread_position_in_grid = make_uint3(
    blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y,
    blockIdx.z * blockDim.z + threadIdx.z);
const uint thread_index_in_simdgroup = threadIdx.x % 32;
const uint simdgroup_index_in_threadgroup = threadIdx.x / 32;
"""

# A header of Metal's library; the file of that name in this folder replaces it.
_METAL_HEADER = re.compile(r"^#include <metal_(\w+)>$", flags=re.MULTILINE)
# An array of a threadgroup, such as `threadgroup float sums[32];` alone on a line.
_SHARED = re.compile(r"^(\s*)threadgroup (\w+ \w+\[)", flags=re.MULTILINE)
# The address space of a pointer, as in `device const T* x`.  CUDA's pointers have none.
_ADDRESS_SPACE = re.compile(r"\b(device|thread|threadgroup) ")
_SHAPE = re.compile(r"\b\w+_(?:shape|strides|ndim)\b")


def metal_kernel(*, name: str, source: str, header: str, **names: Any) -> Any:
    """`mx.fast.metal_kernel` on the CUDA backend.  names: of the inputs and outputs."""
    header, body = as_files(name, *to_cuda(header, source))
    return mx.fast.cuda_kernel(name=name, source=body, header=header, **names)


def to_cuda(header: str, body: str) -> tuple[str, str]:
    """(header, body) for `mx.fast.cuda_kernel`.  Threadgroups must be one-dimensional."""
    header = _ADDRESS_SPACE.sub("", header)
    header = _METAL_HEADER.sub(lambda include: _read(include[1]), header)
    body = _ADDRESS_SPACE.sub("", _SHARED.sub(r"\1__shared__ \2", body))
    return _read("shim") + header, _CUDA_INDICES + body


def _read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.h").read_text(encoding="utf-8")


def as_files(name: str, header: str, body: str) -> tuple[str, str]:
    """Write (header, body) to files; returns the short texts that include these files.

    MLX hashes the whole text at each launch: 3 us for 11 KB, as much as the launch itself.  MLX
    also searches the text for the shapes that a kernel uses, so a comment names them.  File names
    are content hashes, so that another process finds MLX's compiled kernels.
    """
    return _as_file(name, "h", header), _as_file(name, "inc", body)


def _as_file(name: str, part: str, text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = _text_folder() / f"{name}-{digest}.{part}"
    if not file.exists():
        new = file.with_name(f"{file.name}.{threading.get_native_id()}")
        new.write_text(text, encoding="utf-8")
        new.replace(file)  # another process may be reading the file
    shapes = " ".join(sorted(set(_SHAPE.findall(text))))
    return f'\n#include "{file}"\n// {shapes}\n'


def _text_folder() -> Path:
    folder = cache_folder() / "cuda"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(_own_folder().name)


@cache
def _own_folder() -> TemporaryDirectory:
    """A folder that lasts until the process ends, if the home folder is not writable."""
    return TemporaryDirectory(prefix="vllm_metal_lite-")
