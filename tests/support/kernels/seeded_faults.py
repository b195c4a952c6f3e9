"""Faults to seed into kernels, read from text files; seeded_faults.txt explains the format."""

import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"(\w+) (\S+) `([^`]+)`(?: (\d+))? `([^`]*)` ([a-z, -]+)")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


class Fault(NamedTuple):
    """number: which occurrence of the text to replace, from 0.  kinds: the reports that count."""

    kernel: str
    text: str
    number: int
    put_there: str
    kinds: tuple[str, ...]

    def seeded(self, source: str) -> str:
        """The source with the fault."""
        parts = source.split(self.text)
        n = self.number + 1
        assert n < len(parts), f"{self.kernel} has no {self.text!r}: the fault is not seeded"
        return self.text.join(parts[:n]) + self.put_there + self.text.join(parts[n:])


def read_faults(file: Path) -> dict[str, Fault]:
    """Name -> fault, from a text file, or from the one beside a module."""
    faults = {}
    for line in file.with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            found = _LINE.fullmatch(line)
            assert found, f"no fault: {line}"
            name, kernel, text, number, put_there, kinds = found.groups()
            assert name not in faults, f"two faults of one name: {name}"
            text = BARRIER if text == "BARRIER" else text.replace("\\n", "\n")
            put_there = put_there.replace("\\n", "\n")
            faults[name] = Fault(
                kernel, text, int(number or 0), put_there, tuple(kinds.split(", "))
            )
    return faults


FAULTS = read_faults(Path(__file__))
