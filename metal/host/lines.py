"""From an address in a compiled kernel to the line of Metal source it was made of.

Reads the line table that compilers write (the DWARF Debugging Information Format, version 4,
section 6.2) from an ELF library; elsewhere no line is known.
"""

import functools
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .elf import Reader, sections


class Row(NamedTuple):
    """From `address` on, up to the next row, code belongs to this line; none if `file` is empty."""

    address: int
    file: str
    line: int


@functools.cache
def line_table(library: Path) -> list[Row]:
    """All rows, in the order of addresses; empty if the library has no table that can be read."""
    section = sections(library.read_bytes()).get(".debug_line")
    if not section:
        return []
    # Rows of dropped functions point into the first page, which has no code.
    rows = (row for row in _units(section.data) if row.address >= 4096)
    return sorted(rows, key=lambda row: row.address)


def line_at(library: Path, offset: int) -> str:
    """The "file:line" of the code at `offset` in the library, or "" if it is not known."""
    table = line_table(library)
    at = bisect_right(table, offset, key=lambda row: row.address) - 1
    if at < 0 or not table[at].file:
        return ""
    return f"{table[at].file}:{table[at].line}"


def _units(section: bytes) -> Iterator[Row]:
    reader, end = Reader(section), 0
    while end < len(section):
        reader.at = end
        end += reader.number("I") + 4
        if reader.number("H") == 4:
            yield from _program(reader, end)


def _program(reader: Reader, end: int) -> Iterator[Row]:
    """The rows of one compiled file: runs the line-number program."""
    header_length = reader.number("I")
    start = reader.at + header_length
    step = reader.number("B")
    reader.number("H")  # the operations of an instruction, and whether rows are statements
    line_base, line_range, opcode_base = (reader.number(form) for form in "bBB")
    operands = [reader.number("B") for _ in range(opcode_base - 1)]
    folders = [""]
    while folder := reader.text():
        folders.append(folder)
    files = [""]
    while name := reader.text():
        folder = folders[reader.leb()]
        reader.leb(), reader.leb()
        files.append(f"{folder}/{name}" if folder and not name.startswith("/") else name)

    reader.at = start
    address, file, line = 0, 1, 1
    while reader.at < end:
        opcode = reader.number("B")
        if opcode >= opcode_base:
            address += (opcode - opcode_base) // line_range * step
            line += line_base + (opcode - opcode_base) % line_range
            yield _row(address, files[file], line)
        elif opcode == 0:
            length = reader.leb()
            after = reader.at + length
            match reader.number("B"):
                case 1:  # the end of a sequence
                    yield Row(address, "", 0)
                    address, file, line = 0, 1, 1
                case 2:
                    address = reader.number("Q")
            reader.at = after
        elif opcode == 1:
            yield _row(address, files[file], line)
        elif opcode == 2:
            address += reader.leb() * step
        elif opcode == 3:
            line += reader.leb(signed=True)
        elif opcode == 4:
            file = reader.leb()
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * step
        elif opcode == 9:
            address += reader.number("H")
        else:  # not needed: columns, marks of statements, blocks, prologues
            for _ in range(operands[opcode - 1]):
                reader.leb()


def _row(address: int, file: str, line: int) -> Row:
    return Row(address, file, line) if line else Row(address, "", 0)
