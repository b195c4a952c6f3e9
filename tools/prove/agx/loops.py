"""The inner loop of a kernel: instructions and cycles a byte from memory, beside what chips can do.

Cycles are a simdgroup's on its quarter of a core, as others measured them on an M1 Max
(metal-benchmarks): 1 for most instructions, 4 on a second unit for shifts, integer products,
conversions and e^x, 20 for a product of 8x8 matrices.  An access to the stack counts as one.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.prove.agx import mlx_kernels
from tools.prove.agx.chain import listing_of
from tools.prove.agx.shapes import named_texts

_LINE = re.compile(r"^ *([0-9a-f]+): [0-9a-f]+ +(\S+) *(.*)$", re.M)
_SLOW = ("shl", "shr", "asr", "extr", "bfeil", "bfi", "imul", "imadd", "exp2", "log2")
_SECOND_UNIT = {**dict.fromkeys(_SLOW, 4), "rcp": 6, "rsqrt": 8}
_FIRST_UNIT = {"shuffle": 2, "simd": 24}
_MATRIX_HALF = 10  # metal.h makes two multiply-adds with a negated factor of a product
CHIPS = {"M1": 8 * 128 * 1.28 / 68, "M2 Max": 38 * 128 * 1.4 / 400, "M4 Max": 40 * 128 * 1.6 / 546}


class Loop(NamedTuple):
    """Of one turn: instructions, cycles, bytes that a lane loads, and those in loads of 16 bytes,
    stores and loads of the stack."""

    instructions: int
    cycles: int
    loaded: int
    wide: int
    spilled: int


_AFFINE = "affine of 4 bits in groups of 64"
_PACKED = f"9728 x 2560 bfloat16, {_AFFINE}, biased)"
_EXPERTS = f"expert_gemm (256 experts of 2048 x 512, {_AFFINE}, bfloat16) #3"
# Rows of x, as branches depend on them (0: any), and bytes that a lane takes from memory in a turn:
# weights of 4 bits with scales, or a state read and written (0: all loads of 16 bytes: K and V).
LOOPS = (
    ("MLX sdpa_vector 128", 0, 16),
    ("paged_decode (16/8 heads of 128 bfloat16, blocks of 16)", 0, 0),
    ("paged_decode (32/8 heads of 128 bfloat16, blocks of 16)", 0, 0),
    ("paged_decode (64/8 heads of 128 bfloat16, blocks of 16)", 0, 0),
    ("MLX qmv_fast 4 bits", 0, 36),
    (f"skinny_gemm (1 x {_PACKED}", 1, 72),
    (f"skinny_gemm (4 x {_PACKED}", 4, 72),
    (f"skinny_gemm (8 x {_PACKED}", 8, 72),
    (_EXPERTS, 1, 72),
    (_EXPERTS, 4, 72),
    ("MLX gated_delta_seq", 0, 32),
    ("gated_delta (gated delta rule, 16/32 heads of 128x128 bfloat16) #2", 0, 256),
)
_GIVEN = re.compile(r"const int (rows|count) = (?:x_shape\[0\]|plan\[tile \+ 1\]);")


HEADS = ("longest loop", "rows", "instructions", "loaded, from memory", "cycles a byte")
HEADS += tuple(f"{name}: {budget:.1f}" for name, budget in CHIPS.items())


def rows(root: Path) -> Iterator[tuple[str, ...]]:
    """A row for each longest loop, beside the cycles a byte that chips have."""
    texts = named_texts() | mlx_kernels.texts()
    for name, count, streamed in LOOPS:
        text = texts[name]
        given = _GIVEN.sub(rf"constexpr int \1 = {count};", text.text)
        loop = longest_loop(listing_of(root, text._replace(text=given)))
        streamed = streamed or loop.wide
        each = loop.cycles / streamed
        spilled = f" ({loop.spilled} of the stack)" if loop.spilled else ""
        shown = f"{count or ''}", f"{loop.instructions:,}{spilled}", f"{loop.loaded}, {streamed}"
        yield name, *shown, f"{each:.1f}", *(f"{each / budget:.0%}" for budget in CHIPS.values())


def longest_loop(listing: str) -> Loop:
    """Of the longest program in a listing."""
    programs: list[list[tuple[int, str, str]]] = []
    for at, op, rest in _LINE.findall(listing):
        if at == "0":
            programs.append([])
        programs[-1].append((int(at, 16), op, rest))
    code = max(programs, key=len)
    back = [(at + int(rest), at) for at, op, rest in code if op == "jmp_any" and int(rest) < 0]
    first, last = max(back, key=lambda span: span[1] - span[0])
    return _loop([line for line in code if first <= line[0] <= last])


def _loop(code: list[tuple[int, str, str]]) -> Loop:
    first = second = loaded = wide = spilled = 0
    for _, op, rest in code:
        spilled += op.startswith("stack_")
        if op == "load" and (kind := re.search(r"i(\d+), (x\w*)", rest)):
            size = int(kind[1]) // 8 * len(kind[2])
            loaded += size
            wide += size * (size == 16)
        if op in _SECOND_UNIT or "_to_" in op:
            second += _SECOND_UNIT.get(op, 4)
        elif op == "ffma" and ".neg" in rest:
            first += _MATRIX_HALF
        elif op in ("iadd", "isub") and re.match(r"\$?dr", rest):
            first += 4  # 64 bits
        else:
            first += _FIRST_UNIT.get(op, 1)
    return Loop(len(code), max(first, second), loaded, wide, spilled)
