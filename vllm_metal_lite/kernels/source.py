"""The source text of the kernels in metal/.

A file `metal/NAME.metal` has a header comment, includes and helper templates, then a marker, then
the body.  `mx.fast.metal_kernel` writes the function around the body, with a signature derived from
the arrays given at launch.
"""

import hashlib
import re
from functools import cache
from itertools import chain
from pathlib import Path

MARKER = "// --- kernel body ---\n"

_PACKAGE = Path(__file__).parents[1]
# A wheel has `metal/` inside the package, a checkout beside it.
FOLDER = next(p for p in (_PACKAGE / "metal", _PACKAGE.parent / "metal") if p.is_dir())


@cache
def read(name: str) -> tuple[str, str]:
    """The (header, body) of metal/NAME.metal, `#include "..."` directives resolved.

    Comments are stripped, because MLX processes the whole text for each launch in a graph.  Line
    numbers stay the same.
    """
    header, body = (FOLDER / f"{name}.metal").read_text(encoding="utf-8").split(MARKER)
    return strip_comments(_resolve(header)), strip_comments(body)


def strip_comments(text: str) -> str:
    return re.sub(r"[ \t]*//.*", "", text)


@cache
def digest() -> str:
    """A hash of the kernels and of all Python of this package: any change repeats the checks."""
    kernels = (FOLDER.glob(pattern) for pattern in ("*.metal", "*.h", "cuda/*.*"))
    files = [*_PACKAGE.rglob("*.py"), *chain.from_iterable(kernels)]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _resolve(text: str) -> str:
    def included(match: re.Match[str]) -> str:
        return _resolve((FOLDER / match[1]).read_text(encoding="utf-8"))

    return re.sub(r'^#include "(.+)"$', included, text, flags=re.MULTILINE)
