"""The product of a few rows with a weight, fused with the operations before and after."""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.common import bits, unused
from vllm_metal_lite.kernels.launch import Kernel, Template

_SKINNY_GEMM = Kernel("skinny_gemm", ["x", "w", "gain", "residual"], ["y"])

# Most rows per threadgroup; the sums of more rows take more registers.
MAX_ROWS = 64
# Rows of the weight per threadgroup.
_COLUMNS = 16
# Bytes of threadgroup memory for sums.  Metal allows 32 KB for everything.
_SUM_BYTES = 31 << 10


class GemmPlan(NamedTuple):
    """simdgroups: share the depth.  at_once: chunks of 32 elements that each loads together."""

    simdgroups: int
    at_once: int


class RowNorm(NamedTuple):
    """RMS norm of rows.  weight: (depth,), of the rows' type."""

    weight: mx.array
    eps: float


def gemm_plan(rows: int, outputs: int) -> GemmPlan:
    """The plan for x (rows, depth) and a weight of `outputs` rows.

    With few threadgroups, each needs more loads in flight.  With many rows, x takes the registers
    for these loads.
    """
    many = outputs >= profile().gemm_fill * _COLUMNS
    if rows > 32:
        return GemmPlan(8, 1 if many else 4)
    if many:
        return GemmPlan(8, 4 if rows <= 16 else 2)
    return GemmPlan(16, 2)


def suits(weight: mx.array) -> bool:
    """Whether `skinny_gemm` supports a weight (outputs, depth)."""
    return weight.dtype in (mx.float16, mx.bfloat16) and weight.shape[1] % 32 == 0


def fits(x: mx.array, weight: mx.array) -> bool:
    """Whether `skinny_gemm` supports x (rows, depth) @ weight (outputs, depth).T."""
    return len(x) <= MAX_ROWS and x.dtype == weight.dtype and suits(weight)


def skinny_gemm(
    x: mx.array,
    weight: mx.array,
    *,
    norm: RowNorm | None = None,
    residual: mx.array | None = None,
    swiglu: bool = False,
    plan: GemmPlan | None = None,
) -> mx.array:
    """x (rows, depth) @ weight (outputs, depth).T, in 16-bit floats, summed in float32.

    At most MAX_ROWS rows, and a depth that is a multiple of 32.  norm: applied to x first.  swiglu:
    the result is silu(y[:, :outputs / 2]) * y[:, outputs / 2:].  residual: of the result's shape,
    added last.  Rounds where the separate operations would.  plan: by default `gemm_plan`'s.
    Raises ValueError for other shapes or types.
    """
    rows, outputs = len(x), len(weight)
    width = outputs // 2 if swiglu else outputs
    _check(x, weight, norm, residual, (rows, width), swiglu and outputs % 2 == 1)
    simdgroups, at_once = plan or gemm_plan(rows, outputs)
    tiles = -(-rows // 8)
    # The kernel pads each row of sums by four floats.
    room = _SUM_BYTES // (simdgroups * 8 * (_COLUMNS + 4) * 4)
    template: Template = {
        "T": x.dtype, "DEPTH": x.shape[1], "ROW_TILES": tiles, "FULL": rows % 8 == 0,
        "SIMDGROUPS": simdgroups, "AT_ONCE": at_once, "HELD": -(-tiles // -(-tiles // room)),
        "NORM": norm is not None, "EPS": bits(norm.eps if norm else 0.0),
        "RESIDUAL": residual is not None, "SWIGLU": swiglu,
    }  # fmt: skip
    gain = norm.weight if norm else unused()
    residual = unused() if residual is None else residual
    columns = _COLUMNS // 2 if swiglu else _COLUMNS
    return _SKINNY_GEMM(
        [x, weight, gain, residual], template, (-(-width // columns), 1, 1), 32 * simdgroups,
        [(rows, width)], [x.dtype],
    )[0]  # fmt: skip


def _check(
    x: mx.array,
    weight: mx.array,
    norm: RowNorm | None,
    residual: mx.array | None,
    result: tuple[int, int],
    odd: bool,
) -> None:
    if not fits(x, weight) or x.shape[1] != weight.shape[1] or odd:
        raise ValueError(
            f"x {x.shape} {x.dtype} and weight {weight.shape} {weight.dtype} must be of one 16-bit "
            f"float type and depth, a multiple of 32, with at most {MAX_ROWS} rows of x"
            + ", and as many weights for gate as for up"
            * odd
        )
    wanted = {"norm's weight": (norm and norm.weight, x.shape[1:]), "residual": (residual, result)}
    for name, (array, shape) in wanted.items():
        if array is not None and (array.shape != shape or array.dtype != x.dtype):
            raise ValueError(
                f"the {name} must be {shape} {x.dtype}, not {array.shape} {array.dtype}"
            )
