"""The product of a few rows with a weight, fused with the operations before and after."""

from typing import Literal, NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.launch import Kernel, Template, bits, check_array
from vllm_metal_lite.kernels.weight_formats import Weight, inputs_of, readable, shape_of, spread_of
from vllm_metal_lite.specs import WeightShape

_SKINNY_GEMM = Kernel(
    "skinny_gemm", ["x", "w", "scales", "biases", "gain", "bias", "residual"], ["y"]
)
# GateActivation in metal/skinny_gemm.metal, by the activation's name.
_GATES = {None: 0, "silu": 1, "gelu_approx": 2}
Gate = Literal["silu", "gelu_approx"]

# The most rows of a threadgroup: the sums of more rows take too many registers.
MAX_ROWS = 64
# The fewest rows of the weight that a threadgroup multiplies.
_COLUMNS = 16
# The most rows whose products are made without matrix instructions.
MAX_LANE_ROWS = 4
# Bytes of threadgroup memory for sums.  Metal allows 32 KB in all.
_SUM_BYTES = 31 << 10


class GemmPlan(NamedTuple):
    """simdgroups: the SIMD groups that share the depth.  at_once: the loads in flight.  spread: the
    chunks of 32 weights in one load.  columns: the rows of the weight in a threadgroup, 16 or 32.
    in_lanes: multiply without matrix instructions; only for MAX_LANE_ROWS rows and fewer."""

    simdgroups: int
    at_once: int
    spread: int = 1
    columns: int = _COLUMNS
    in_lanes: bool = False


def gemm_plan(rows: int, weight: WeightShape) -> GemmPlan:
    """The plan for x (rows, depth) and a weight.

    With few threadgroups, each needs more loads in flight.  With many rows, x takes the registers
    for these loads.
    """
    many = weight.outputs >= profile().gemm_fill * _COLUMNS
    simdgroups = 8 if many or rows > 32 else 16
    if weight.quantisation is None:
        if rows > 32:
            return GemmPlan(8, 1 if many else 4)
        return GemmPlan(simdgroups, 4 if many and rows <= 16 else 2)
    # A load is several chunks, and a short row has few loads.
    spread = spread_of(weight)
    loads = max(1, weight.depth // (32 * spread))
    simdgroups = min(simdgroups, 1 << (loads.bit_length() - 1))
    in_lanes = multiplies_in_lanes(rows, weight)
    if weight.outputs >= 2 * profile().gemm_fill * _COLUMNS and rows <= 32 and not in_lanes:
        # Each threadgroup reads and normalises all of x, which has more bytes than 16 columns.
        # (In lanes, columns take registers.)
        return GemmPlan(simdgroups, 1, spread, 2 * _COLUMNS)
    at_once = min(2 if rows <= 32 else 1, loads // simdgroups)
    return GemmPlan(simdgroups, at_once, spread, _COLUMNS, in_lanes)


def multiplies_in_lanes(rows: int, weight: WeightShape) -> bool:
    """Whether `rows` rows are multiplied without matrix instructions."""
    return weight.quantisation is not None and rows <= profile().max_lane_rows


def serves(x: mx.array, weight: Weight) -> bool:
    """Whether `skinny_gemm` supports x (rows, depth) @ weight (outputs, depth).T."""
    return (
        len(x) <= MAX_ROWS
        and readable(weight)
        and x.dtype in (mx.float16, mx.bfloat16)
        and (weight.dtype is None or weight.dtype == x.dtype)
    )


def skinny_gemm(
    x: mx.array,
    weight: Weight,
    *,
    norm: RMSNorm | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    gate: Gate | None = None,
    plan: GemmPlan | None = None,
) -> mx.array:
    """x (rows, depth) @ weight (outputs, depth).T, in 16-bit floats, summed in float32.

    `serves` says which inputs are served.  norm: is applied to x first, and has a weight.  bias:
    (outputs,), is added to the product.  gate: the result is the activation of y[:, :outputs / 2]
    times y[:, outputs / 2:].  residual: is added last, and has the result's shape.  plan: the
    default is `gemm_plan`'s.  The kernel rounds where the separate operations would.  It rounds a
    quantised weight as `mx.dequantize` does, or not at all if the plan is `in_lanes`.
    """
    rows, (outputs, depth) = len(x), weight.shape
    width = outputs // 2 if gate else outputs
    gain = norm and norm.weight
    check_array("x", x, (rows, depth), weight.dtype)
    check_array("norm's weight", gain, (depth,), x.dtype)
    check_array("bias", bias, (outputs,), x.dtype)
    check_array("residual", residual, (rows, width), x.dtype)
    simdgroups, at_once, spread, columns, in_lanes = plan or gemm_plan(rows, shape_of(weight))
    tiles = -(-rows // 8)
    # The kernel pads each row of sums by four floats.
    room = _SUM_BYTES // (simdgroups * 8 * (columns + 4) * 4)
    arrays, weight_values = inputs_of(weight)
    held = -(-tiles // -(-tiles // room))
    lane_rows = (1 if rows == 1 else MAX_LANE_ROWS) if in_lanes else 0
    template: Template = {"T": x.dtype, **weight_values, "SPREAD": spread, "DEPTH": depth}
    template |= {"ROW_TILES": tiles, "FULL": rows % 8 == 0, "LANE_ROWS": lane_rows}
    template |= {"COLUMNS": columns, "SIMDGROUPS": simdgroups, "AT_ONCE": at_once, "HELD": held}
    template |= {"NORM": norm is not None, "EPS": bits(norm.eps if norm else 0.0)}
    template |= {"BIAS": bias is not None, "RESIDUAL": residual is not None, "GATE": _GATES[gate]}
    out_columns = columns // 2 if gate else columns
    inputs, grid = [x, *arrays, gain, bias, residual], (-(-width // out_columns), 1, 1)
    return _SKINNY_GEMM(inputs, template, grid, 32 * simdgroups, [((rows, width), x.dtype)])[0]
