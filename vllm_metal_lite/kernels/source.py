"""The text of a kernel of metal/, and what makes of it a CUDA kernel.

A file `metal/NAME.metal` is a header comment, includes and helper templates; then a marker; then
the body.  `mx.fast.metal_kernel` writes the function around the body: its signature comes from the
arrays given at launch.
"""

import hashlib
import os
import re
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

MARKER = "// --- kernel body ---\n"

_PACKAGE = Path(__file__).parents[1]
# Inside a wheel `metal/` lies in the package; in a checkout beside it.
FOLDER = next(p for p in (_PACKAGE / "metal", _PACKAGE.parent / "metal") if p.is_dir())


@cache
def read(name: str) -> tuple[str, str]:
    """The (header, body) of metal/NAME.metal, `#include "..."` of files beside it resolved.

    Without comments: MLX handles the whole text anew each time that a launch is put into a graph.
    Lines stay where they are.
    """
    header, body = (FOLDER / f"{name}.metal").read_text(encoding="utf-8").split(MARKER)
    return _strip(_resolve(header)), _strip(body)


def _strip(text: str) -> str:
    return re.sub(r"[ \t]*//.*", "", text)


def _resolve(text: str) -> str:
    def included(match: re.Match[str]) -> str:
        return _resolve((FOLDER / match[1]).read_text(encoding="utf-8"))

    return re.sub(r'^#include "(.+)"$', included, text, flags=re.MULTILINE)


# The index variables of Metal, where CUDA's are; `mx.fast.cuda_kernel` declares none.
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
        return _strip((FOLDER / "cuda" / f"{name}.h").read_text(encoding="utf-8"))

    header = _METAL_HEADER.sub(lambda match: shim(match[1]), _ADDRESS_SPACE.sub("", header))
    body = _SHARED.sub(r"\1__shared__ \2", body)
    return shim("shim") + header, _CUDA_INDICES + _ADDRESS_SPACE.sub("", body)


def as_files(name: str, header: str, body: str) -> tuple[str, str]:
    """A CUDA kernel's text as includes of files that hold it.

    MLX hashes the whole text at each launch: 3 us for 11 KB, as much as the launch itself costs.
    It also looks there for the shapes that a kernel asks for, so they are named in a comment.
    Files are named by what they hold, so that another process finds what MLX has compiled.
    """
    parts = []
    for part, text in (("h", header), ("inc", body)):
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        file = _text_folder() / f"{name}-{digest}.{part}"
        if not file.exists():
            with NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as new:
                new.write(text)
            os.replace(new.name, file)  # whole, whoever else writes it
        shapes = " ".join(sorted(set(_SHAPE.findall(text))))
        parts.append(f'\n#include "{file}"\n// {shapes}\n')
    return tuple(parts)


def cache_folder() -> Path:
    """Where what was found out about kernels is kept from one process to the next."""
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return home / "vllm_metal_lite"


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
    """Until the process ends, for a home that cannot be written to."""
    return TemporaryDirectory(prefix="vllm_metal_lite-")
