"""The product of a few rows with a weight."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Kernel

_SKINNY_GEMM = Kernel("skinny_gemm", ["x", "w"], ["y"])

# Rows that a threadgroup keeps sums of: the more, the more registers.
MAX_ROWS = 64
# Columns of the result that a threadgroup computes.
_COLUMNS = 16
# Bytes of threadgroup memory for sums, of which Metal allows 32 KB.
_SUM_BYTES = 32 << 10
# Threadgroups that keep a device busy with 8 simdgroups each, by what was measured on an H200.
_ENOUGH = 128


class GemmPlan(NamedTuple):
    """simdgroups: that share the depth.  at_once: chunks of 32 elements each asks for together."""

    simdgroups: int
    at_once: int


def gemm_plan(rows: int, outputs: int) -> GemmPlan:
    """How x (rows, depth) is multiplied by a weight of `outputs` rows.

    Few threadgroups need more bytes under way each; of many rows x takes the registers for that.
    """
    many = outputs >= _ENOUGH * _COLUMNS
    if rows > 32:
        return GemmPlan(8, 1 if many else 4)
    if many:
        return GemmPlan(8, 4 if rows <= 16 else 2)
    return GemmPlan(16, 2)


def suits(weight: mx.array) -> bool:
    """Whether `skinny_gemm` multiplies by a weight (outputs, depth)."""
    return weight.dtype in (mx.float16, mx.bfloat16) and weight.shape[1] % 32 == 0


def fits(x: mx.array, weight: mx.array) -> bool:
    """Whether it computes x (rows, depth) times weight (outputs, depth), transposed."""
    return len(x) <= MAX_ROWS and x.dtype == weight.dtype and suits(weight)


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
    simdgroups, at_once = plan or gemm_plan(rows, outputs)
    tiles = -(-rows // 8)
    # The kernel has four floats of nothing behind each row of sums.
    room = _SUM_BYTES // (simdgroups * 8 * (_COLUMNS + 4) * 4)
    template = {
        "T": x.dtype, "DEPTH": x.shape[1], "ROW_TILES": tiles, "FULL": rows % 8 == 0,
        "SIMDGROUPS": simdgroups, "AT_ONCE": at_once, "HELD": -(-tiles // -(-tiles // room)),
    }  # fmt: skip
    return _SKINNY_GEMM(
        [x, weight], template, (-(-outputs // _COLUMNS), 1, 1), 32 * simdgroups,
        [(rows, outputs)], [x.dtype],
    )[0]  # fmt: skip
