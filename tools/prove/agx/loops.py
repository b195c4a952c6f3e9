"""What the inner loop of a kernel costs: instructions and cycles a byte from memory, beside what chips can do.

Cycles are a simdgroup's on its quarter of a core, as measured by others on an M1 Max (metal-benchmarks):
1 for most instructions, 4 on a second unit for shifts, integer products, conversions and e^x, 20 for a
product of 8x8 matrices.  Stores and loads of spilled registers count as one instruction each.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.production_shapes import texts_of
from tools.prove.agx import mlx_kernels
from tools.prove.agx.chain import listing_of
from tools.prove.agx.shapes import CASES

_LINE = re.compile(r"^ *([0-9a-f]+): [0-9a-f]+ +(\S+) *(.*)$", re.M)
_SECOND_UNIT = {"shl": 4, "shr": 4, "asr": 4, "extr": 4, "bfeil": 4, "bfi": 4, "imul": 4, "imadd": 4}
_SECOND_UNIT |= {"exp2": 4, "log2": 4, "rcp": 6, "rsqrt": 8}
_FIRST_UNIT = {"shuffle": 2, "simd": 24}
_MATRIX_HALF = 10  # metal.h makes two multiply-adds with a negated factor of a product
CHIPS = {"M1": 8 * 128 * 1.28 / 68, "M2 Max": 38 * 128 * 1.4 / 400, "M4 Max": 40 * 128 * 1.6 / 546}


class Loop(NamedTuple):
    """Of one turn: instructions, cycles, bytes that a lane loads, stores and loads of the stack."""

    instructions: int
    cycles: int
    loaded: int
    spilled: int


def loops_of(listing: str) -> list[Loop]:
    """The innermost loops of the longest program of a listing, in order."""
    programs: list[list[tuple[int, str, str]]] = []
    for at, op, rest in _LINE.findall(listing):
        if at == "0":
            programs.append([])
        programs[-1].append((int(at, 16), op, rest))
    code = max(programs, key=len)
    jumps = [(at + int(rest), at) for at, op, rest in code if op == "jmp_any" and int(rest) < 0]
    inner = [s for s in jumps if not any(s[0] <= a and b <= s[1] for a, b in jumps if (a, b) != s)]
    return [_loop([line for line in code if first <= line[0] <= last]) for first, last in inner]


def _loop(code: list[tuple[int, str, str]]) -> Loop:
    first = second = loaded = spilled = 0
    for _, op, rest in code:
        spilled += op.startswith("stack_")
        if op == "load":
            kind = re.search(r"i(\d+), (x\w*)", rest)
            loaded += int(kind[1]) // 8 * len(kind[2])
        if op in _SECOND_UNIT or "_to_" in op:
            second += _SECOND_UNIT.get(op, 4)
        elif op == "ffma" and ".neg" in rest:
            first += _MATRIX_HALF
        elif op in ("iadd", "isub") and re.match(r"\$?dr", rest):
            first += 4  # 64 bits
        else:
            first += _FIRST_UNIT.get(op, 1)
    return Loop(len(code), max(first, second), loaded, spilled)
