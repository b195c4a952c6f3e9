"""Which lines of the kernels no test has run.

With METAL_LITE_HOST_COVERAGE=1, clang counts how often each region of the source is entered, and
stores in the library where the regions lie (its "source-based code coverage"; LLVM's page "Code
Coverage Mapping Format" describes the layout). Regions are merged over all instances of a kernel: a
line counts as run if any of them ran it.
"""

import ctypes
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import origin
from .elf import Reader, sections
from .translate import without_comments

_NOTHING, _MISSED, _RAN = 0, 1, 2
_CODE, _SKIPPED = 0, 2
_PROFILE_RECORD = 64  # bytes of one function's record, since LLVM 18
_STATEMENT = re.compile(r"\s+(return\b|\w[^=;]*[^=!<>]=[^=]).*;")
_DECLARATION = re.compile(r"\s*(constexpr|using|typedef|static|constant|template)\b")
_LINE_DIRECTIVE = re.compile(r'^#line (\d+) "(.*)"$')


class Region(NamedTuple):
    start: tuple[int, int]  # line and column, from 1
    end: tuple[int, int]  # exclusive
    mark: int


# For each source file and line: of each character, whether it is code and whether it ran.
Marks = dict[str, dict[int, bytes]]

_watched: dict[Path, int] = {}  # library -> where it is loaded
_taken: list[Marks] = []  # of other processes


def watch(library: Path, image: int) -> None:
    """Counts of this library are part of the report from now on."""
    _watched[library] = image


def take(marks: Marks) -> None:
    """What another process of the same test run has seen is part of the report from now on."""
    _taken.append(marks)


def marks() -> Marks:
    """Of all libraries watched here, and what was taken from others."""
    files: Marks = defaultdict(dict)
    for library, image in _watched.items():
        text = library.with_suffix(".cpp").read_text()
        lines = without_comments(text).split("\n")
        painted = _paint(lines, _functions(library, image))
        for (name, number), row in zip(_origins(text), painted, strict=True):
            files[name][number] = _merged(files[name].get(number, b""), row)
    for taken in _taken:
        for name, rows in taken.items():
            for number, row in rows.items():
                files[name][number] = _merged(files[name].get(number, b""), row)
    return dict(files)


def _merged(a: bytes, b: bytes) -> bytes:
    width = max(len(a), len(b))
    return bytes(map(max, a.ljust(width, b"\0"), b.ljust(width, b"\0")))


def report() -> list[str]:
    """A line of text for each file in metal/ that has lines that no run has executed.

    Nothing if no kernel of these files has run at all.
    """
    seen = marks()
    files = {origin.label(path): path for path in origin.kernel_files()}
    if not files.keys() & seen.keys():
        return []
    found = []
    for name, path in files.items():
        if name not in seen:
            found.append(f"{name}: never run")
        elif missed := missed_lines(path.read_text(), seen[name]):
            found.append(f"{name}: lines not run: {_ranges(missed)}")
    return found


def missed_lines(text: str, rows: dict[int, bytes]) -> list[int]:
    """The numbers of the lines with code that never ran, all or in part.

    A function or a branch of `if constexpr` that nothing instantiates has no regions: statements
    there are known by their look.
    """
    missed = []
    for number, line in enumerate(without_comments(text).split("\n"), 1):
        row = rows.get(number, b"")
        if any(row):
            part = "".join(c for c, mark in zip(line, row, strict=False) if mark == _MISSED)
            if re.search(r"\w", part):
                missed.append(number)
        elif _STATEMENT.match(line) and not _DECLARATION.match(line):
            missed.append(number)
    return missed


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] as "1-3, 7"."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else f"{g[0]}" for g in groups)


def _origins(text: str) -> Iterator[tuple[str, int]]:
    """The file and line that each line of a translated text comes from, by `#line`."""
    name, number = "", 0
    for line in text.split("\n"):
        yield name, number
        number += 1
        if directive := _LINE_DIRECTIVE.match(line):
            number, name = int(directive[1]), directive[2]


def _paint(lines: list[str], functions: Iterator[list[Region]]) -> list[bytearray]:
    """Each character's mark: of the innermost region around it, the best over all functions."""
    painted = [bytearray(len(line)) for line in lines]
    for regions in functions:
        rows: dict[int, bytearray] = {}
        for start, end, mark in sorted(regions, key=lambda r: (r.start, (-r.end[0], -r.end[1]))):
            for number in range(start[0], end[0] + 1):
                width = len(lines[number - 1])
                row = rows.setdefault(number, bytearray(width))
                first = start[1] - 1 if number == start[0] else 0
                last = min(end[1] - 1 if number == end[0] else width, width)
                row[first:last] = bytes([mark]) * (last - first)
        for number, row in rows.items():
            painted[number - 1] = bytearray(map(max, painted[number - 1], row))
    return painted


def _functions(library: Path, image: int) -> Iterator[list[Region]]:
    """The regions of each compiled function that lie in the translated text itself."""
    parts = sections(library.read_bytes())
    if "__llvm_covfun" not in parts:
        return
    (version,) = struct.unpack_from("<I", parts["__llvm_covmap"].data, 12)
    if version < 5:
        raise RuntimeError(f"coverage: layout {version} is not understood, 5 or later is")
    counters = _counters(parts, image)
    names = _file_names(parts["__llvm_covmap"].data)
    data, at = parts["__llvm_covfun"].data, 0
    while at + 28 <= len(data):
        name, size, code_hash, _ = struct.unpack_from("<QIQQ", data, at)
        at += 28
        if where := counters.get((name, code_hash)):  # else nothing calls the function
            yield _regions(Reader(data[at : at + size]), where, names)
        at = (at + size + 7) & ~7


def _counters(parts: dict, image: int) -> dict[tuple[int, int], int]:
    """Where the counters of each function (by the hashes of its name and code) lie in memory."""
    records = parts["__llvm_prf_data"]
    found = {}
    for at in range(0, len(records.data), _PROFILE_RECORD):
        name, code_hash, distance = struct.unpack_from("<QQq", records.data, at)
        found[name, code_hash] = image + records.address + at + distance
    return found


def _file_names(data: bytes) -> list[str]:
    size = struct.unpack_from("<I", data, 4)[0]
    reader = Reader(data[16 : 16 + size])
    count, _, packed = reader.leb(), reader.leb(), reader.leb()
    rest = reader.data[reader.at :]
    reader = Reader(zlib.decompress(rest[:packed]) if packed else rest)
    return [reader.take(reader.leb()).decode() for _ in range(count)]


def _regions(reader: Reader, counters: int, names: list[str]) -> list[Region]:
    files = [names[reader.leb()] for _ in range(reader.leb())]
    expressions = [(reader.leb(), reader.leb()) for _ in range(reader.leb())]

    def value(counter: int) -> int:
        index, kind = counter >> 2, counter & 3
        if kind == 1:
            return ctypes.c_uint64.from_address(counters + 8 * index).value
        if kind == 0:
            return 0
        left, right = (value(side) for side in expressions[index])
        return left - right if kind == 2 else left + right

    regions = []
    for file in files:
        line = 0
        for _ in range(reader.leb()):
            counter, kind = reader.leb(), _CODE
            if counter & 3 == 0:
                expansion = counter & 4
                kind = -1 if expansion else counter >> 3
                if kind == 4:  # a branch: two counters of its own
                    reader.leb(), reader.leb()
                counter = 0
            line += reader.leb()
            column, height, last = reader.leb(), reader.leb(), reader.leb()
            gap = last >> 31
            if kind in (_CODE, _SKIPPED) and not gap and file.endswith(".cpp"):
                mark = _NOTHING if kind == _SKIPPED else _RAN if value(counter) > 0 else _MISSED
                regions.append(Region((line, column), (line + height, last), mark))
    return regions
