"""From which files a kernel's text comes, so that messages and coverage name their lines.

The text may have lost its comments and blank lines, and may be put together from several files.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).parents[1]


class _Line(NamedTuple):
    file: str
    number: int
    text: str


def kernel_files() -> list[Path]:
    """The kernels and the headers that they share."""
    return sorted([*KERNELS.glob("*.metal"), *KERNELS.glob("*.h")])


def label(path: Path) -> str:
    """The name of one of the files in messages."""
    return f"{KERNELS.name}/{path.name}"


def _code(line: str) -> str:
    return re.sub(r"//.*", "", line).rstrip()


@functools.cache
def _files(folder: Path) -> tuple[list[_Line], dict[str, list[int]]]:
    """The lines of all files that are not blank or comment, and where in this list each occurs."""
    known, places = [], defaultdict(list)
    for path in kernel_files():
        for number, line in enumerate(path.read_text().split("\n"), 1):
            if code := _code(line):
                places[code].append(len(known))
                known.append(_Line(label(path), number, code))
    return known, places


def _origins(codes: list[str]) -> list[tuple[str, int] | None]:
    """For each line of code, the file and line that it comes from: the longest run that matches."""
    known, places = _files(KERNELS)
    origins: list[tuple[str, int] | None] = []
    while len(origins) < len(codes):
        start, best = len(origins), []
        for place in places.get(codes[start], ()):
            run = []
            for code, line in zip(codes[start:], known[place:], strict=False):
                if code != line.text or line.file != known[place].file:
                    break
                run.append((line.file, line.number))
            best = max(best, run, key=len)
        # One or two equal lines may be chance.
        origins += best if len(best) >= min(4, max(2, len(codes))) else [None]
    return origins


def _marked(text: str, otherwise: str) -> str:
    """The text with a `#line` directive wherever the next line is not the next of its file."""
    lines = text.split("\n")
    codes = [_code(line) for line in lines]
    origins = iter(_origins([code for code in codes if code]))
    marked, expected = [], None
    for number, (line, code) in enumerate(zip(lines, codes, strict=True), 1):
        if code:
            file, at = next(origins) or (otherwise, number)
            if (file, at) != expected:
                marked.append(f'#line {at} "{file}"')
            expected = file, at
        marked.append(line)
        expected = expected and (expected[0], expected[1] + 1)
    return "\n".join(marked)


def mark_lines(generated: str, definition: Mapping) -> str:
    """MLX's generated text with `#line` directives around what the kernel's author wrote."""
    name = definition["name"]
    for part in ("header", "source"):
        text = definition[part]
        if text.strip() and text in generated:
            before, _, after = generated.partition(text)
            marked = _marked(text, f"{name} ({part})")
            generated = f'{before}\n{marked}\n#line 1 "{name}"\n{after}'
    return generated
