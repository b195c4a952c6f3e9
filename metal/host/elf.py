"""Reads the parts of an ELF library that compilers leave for tools."""

import struct
from typing import NamedTuple


class Section(NamedTuple):
    """The bytes of a section, and its address relative to the start of the library."""

    address: int
    data: bytes


def sections(library: bytes) -> dict[str, Section]:
    """Name -> section; empty if this is no 64-bit ELF file."""
    if library[:5] != b"\x7fELF\x02":
        return {}
    (headers,) = struct.unpack_from("<Q", library, 0x28)
    _, count, names = struct.unpack_from("<HHH", library, 0x3A)
    table = [struct.unpack_from("<IIQQQQ", library, headers + i * 64) for i in range(count)]
    found = {}
    for name, _, _, address, offset, size in table:
        start = table[names][4] + name
        label = library[start : library.index(b"\0", start)].decode()
        found[label] = Section(address, library[offset : offset + size])
    return found


class Reader:
    """Reads numbers and texts one after another."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        """A number of the fixed size that a letter of `struct` names."""
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        """A text that ends with a zero byte."""
        text = self.data[self.at : self.data.index(b"\0", self.at)]
        self.at += len(text) + 1
        return text.decode()

    def leb(self, signed: bool = False) -> int:
        """A number of variable size: 7 bits a byte (LEB128)."""
        value = shift = 0
        while True:
            byte = self.number("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value
