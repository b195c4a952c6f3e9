"""Faults to be seeded into kernels, from seeded_faults.txt."""

import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"(\w+) (\S+) `([^`]+)`(?: (\d+))? `([^`]*)` ([a-z, -]+)")
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


class Fault(NamedTuple):
    """number: of the occurrences of the text, the first is 0.  kinds: what may be reported."""

    kernel: str
    text: str
    number: int
    put_there: str
    kinds: tuple[str, ...]


def _faults() -> dict[str, Fault]:
    faults = {}
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            found = _LINE.fullmatch(line)
            assert found, f"no fault: {line}"
            name, kernel, text, number, put_there, kinds = found.groups()
            assert name not in faults, f"two faults of one name: {name}"
            text = _BARRIER if text == "BARRIER" else text.replace("\\n", "\n")
            put_there = put_there.replace("\\n", "\n")
            faults[name] = Fault(
                kernel, text, int(number or 0), put_there, tuple(kinds.split(", "))
            )
    return faults


FAULTS = _faults()
