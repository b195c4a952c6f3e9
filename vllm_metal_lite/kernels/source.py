"""The text of a kernel of metal/.

A file `metal/NAME.metal` is a header comment, includes and helper templates; then a marker; then
the body.  `mx.fast.metal_kernel` writes the function around the body: its signature comes from the
arrays given at launch.
"""

import re
from functools import cache
from pathlib import Path

from vllm_metal_lite import envs

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
    return strip_comments(_resolve(header)), strip_comments(body)


def strip_comments(text: str) -> str:
    return re.sub(r"[ \t]*//.*", "", text)


def names() -> list[str]:
    """Of all kernels."""
    return sorted(file.stem for file in FOLDER.glob("*.metal"))


def _resolve(text: str) -> str:
    def included(match: re.Match[str]) -> str:
        return _resolve((FOLDER / match[1]).read_text(encoding="utf-8"))

    return re.sub(r'^#include "(.+)"$', included, text, flags=re.MULTILINE)


def cache_folder() -> Path:
    """Where findings about the kernels are kept from one process to the next."""
    return envs.cache_home() / "vllm_metal_lite"
