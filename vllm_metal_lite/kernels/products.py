"""The product of a few rows with a weight."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Kernel

_SKINNY_GEMM = Kernel("skinny_gemm", ["x", "w"], ["y"])

# Rows that a threadgroup keeps sums of: the more, the more registers.
MAX_ROWS = 64
# Floats of threadgroup memory, of which Metal allows 32 KB.
_SUMS = 8192
# Threadgroups from which on each may take twice the columns, and read x half as often.
_MANY = 128


class GemmPlan(NamedTuple):
    """parts: rows of the weight a threadgroup, in eights (even).  simdgroups: that share the depth.
    at_once: chunks of 32 elements that each asks for together.
    """

    parts: int
    simdgroups: int
    at_once: int


def fits(x: mx.array, weight: mx.array) -> bool:
    """Whether `skinny_gemm` computes x (rows, depth) times weight (outputs, depth), transposed."""
    return (
        len(x) <= MAX_ROWS
        and x.dtype == weight.dtype
        and x.dtype in (mx.float16, mx.bfloat16)
        and x.shape[1] % 32 == 0
    )


def gemm_plan(rows: int, outputs: int) -> GemmPlan:
    """How the product of x (rows, depth) with a weight of `outputs` rows is laid out."""
    parts = 4 if rows > 16 and outputs >= _MANY * 32 else 2
    return GemmPlan(parts, 8, 8 // parts)


def skinny_gemm(x: mx.array, weight: mx.array, plan: GemmPlan | None = None) -> mx.array:
    """x (rows, depth) @ weight (outputs, depth).T, in 16-bit floats, summed in float32.

    At most MAX_ROWS rows, and a depth that is a multiple of 32.  plan: by default `gemm_plan`'s.
    """
    if not fits(x, weight) or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x {x.shape} {x.dtype} and weight {weight.shape} {weight.dtype} must be of one 16-bit "
            f"float type and depth, a multiple of 32, with at most {MAX_ROWS} rows of x"
        )
    rows, outputs = len(x), len(weight)
    tiles = -(-rows // 8)
    parts, simdgroups, at_once = plan or gemm_plan(rows, outputs)
    room = _SUMS // (parts * tiles * 64)  # simdgroups whose sums there is memory for
    template = {
        "T": x.dtype, "ROW_TILES": tiles, "PARTS": parts, "SIMDGROUPS": simdgroups,
        "AT_ONCE": at_once, "KEPT": min(simdgroups, 1 << (room.bit_length() - 1)),
    }  # fmt: skip
    return _SKINNY_GEMM(
        [x, weight], template, (-(-outputs // (8 * parts)), 1, 1), 32 * simdgroups,
        [(rows, outputs)], [x.dtype],
    )[0]  # fmt: skip
