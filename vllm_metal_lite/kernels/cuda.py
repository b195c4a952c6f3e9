"""Converts Metal kernels to CUDA, so that one source also runs on NVIDIA GPUs.

On such a GPU, the import of this module also mends two functions of MLX's CUDA backend.
"""

import hashlib
import os
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.envs import cache_folder
from vllm_metal_lite.kernels.findings import write_atomically
from vllm_metal_lite.kernels.source import FOLDER, strip_comments

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

_SHAPE = re.compile(r"\b\w+_(?:shape|strides|ndim)\b")
_SHARED = re.compile(r"^(\s*)threadgroup (\w+ \w+\[)", flags=re.MULTILINE)
_METAL_HEADER = re.compile(r"^#include <metal_(\w+)>$", flags=re.MULTILINE)
_ADDRESS_SPACE = re.compile(r"\b(device|thread|threadgroup) ")


def to_cuda(header: str, body: str) -> tuple[str, str]:
    """The same kernel for `mx.fast.cuda_kernel`.  Threadgroups must be one-dimensional."""

    def shim(name: str) -> str:
        return strip_comments((FOLDER / "cuda" / f"{name}.h").read_text(encoding="utf-8"))

    header = _METAL_HEADER.sub(lambda match: shim(match[1]), _ADDRESS_SPACE.sub("", header))
    body = _SHARED.sub(r"\1__shared__ \2", body)
    return shim("shim") + header, _CUDA_INDICES + _ADDRESS_SPACE.sub("", body)


def as_files(name: str, header: str, body: str) -> tuple[str, str]:
    """Write a CUDA kernel's text to files; returns `#include`s of these files.

    MLX hashes the whole text at each launch: 3 us for 11 KB, as much as the launch itself.  MLX
    also searches the text for the shapes that a kernel uses, so a comment names them.  File names
    are content hashes, so that another process finds MLX's compiled kernels.
    """
    return _as_file(name, "h", header), _as_file(name, "inc", body)


def _as_file(name: str, part: str, text: str) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = _text_folder() / f"{name}-{digest}.{part}"
    if not file.exists():
        write_atomically(file, text)
    shapes = " ".join(sorted(set(_SHAPE.findall(text))))
    return f'\n#include "{file}"\n// {shapes}\n'


def _text_folder() -> Path:
    folder = cache_folder() / "cuda"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(_own_folder().name)


@cache
def _own_folder() -> TemporaryDirectory:
    """A folder that lasts until the process ends, if the home folder is not writable."""
    return TemporaryDirectory(prefix="vllm_metal_lite-")


# From this many rows on, expanding the weights first is faster: for 2,048 rows, 437 us instead of
# 1,353 us.
_EXPANDED_ROWS = 1024


def flatten_quantised(
    original: Callable[..., mx.array],
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    **how: Any,
) -> mx.array:
    """mx.quantized_matmul for packed rows (N, 1, K), as one product of (N, K).

    MLX CUDA computes (N, 1, K) as N products, and each reads the weights: 64 rows of 2,560 by
    19,456 take 1,293 us, but 65 us as (N, K).
    """
    if x.ndim > 3 or x.shape[1:-1] not in ((), (1,)) or w.ndim != 2 or not transpose:
        return original(x, w, scales, biases, transpose, **how)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if len(rows) >= _EXPANDED_ROWS:
        out = rows @ mx.dequantize(w, scales, biases, **how).T.astype(rows.dtype)
    else:
        out = original(rows, w, scales, biases, transpose, **how)
    return out.reshape(*x.shape[:-1], -1)


# CUDA's limit for the z dimension of a grid, in which MLX's gather_qmv counts pairs.
_MOST_PAIRS = 65535


def split_gathers(
    original: Callable[..., mx.array],
    x: mx.array,
    *arrays: Any,
    rhs_indices: mx.array | None = None,
    **how: Any,
) -> mx.array:
    """mx.gather_qmm for sorted pairs (row, expert), x (pairs, 1, K), at most _MOST_PAIRS at once.

    MLX CUDA launches more pairs with a grid that CUDA refuses: "cuGraphAddKernelNode: invalid
    argument" (`gather_qmv` in mlx/backend/cuda/quantized/qmm/qmv.cu).
    """
    if (
        rhs_indices is None
        or rhs_indices.ndim != 1
        or rhs_indices.size <= _MOST_PAIRS
        or x.ndim != 3
        or len(x) != rhs_indices.size
    ):
        return original(x, *arrays, rhs_indices=rhs_indices, **how)
    starts = range(_MOST_PAIRS, len(x), _MOST_PAIRS)
    parts = zip(mx.split(x, starts), mx.split(rhs_indices, starts), strict=True)
    return mx.concatenate([original(a, *arrays, rhs_indices=i, **how) for a, i in parts])


if backend.name() == "cuda":
    mx.quantized_matmul = partial(flatten_quantised, mx.quantized_matmul)
    mx.gather_qmm = partial(split_gathers, mx.gather_qmm)
