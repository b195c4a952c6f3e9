"""A mixture of experts.  Each used expert is read once for all of its rows, or once a tile."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import (
    MIN_ELEMENTS,
    Kernel,
    Template,
    bits,
    check_array,
    grid_for,
)
from vllm_metal_lite.kernels.skinny_gemm import MAX_LANE_ROWS, GemmPlan, multiplies_in_lanes
from vllm_metal_lite.kernels.weight_formats import Weight, inputs_of, readable, shape_of, spread_of
from vllm_metal_lite.specs import ExpertActivation, ExpertShape, WeightShape

_PLAN = Kernel("expert_plan", ["indices", "num_live"], ["plan"])
_GEMM = Kernel(
    "expert_gemm",
    [
        *("x", "indices", "plan", "w", "scales", "biases", "bias"),
        *("up_w", "up_scales", "up_biases", "up_bias"),
    ],
    ["y"],
)
_SUM = Kernel("expert_sum", ["x", "weights"], ["y"])

# The most rows and experts: the kernel counts them in threadgroup memory.
MAX_ROWS, MAX_EXPERTS = 1 << 14, 1024
# The kernels count the elements of x in 32 bits.
_MAX_ELEMENTS = (1 << 31) - 1
# The pairs of a tile.  A large tile needs more registers; a small tile reads an expert more often.
_TILES = (1, MAX_LANE_ROWS, 8, 16, 32)
_COLUMNS = 16
# ExpertActivation in metal/expert_gemm.metal.
_ACTIVATIONS = {None: 0, "swiglu": 1, "clamped_swiglu": 2, "geglu": 3, "relu2": 4}
# SIMD groups that make a plan, and the (row, choice) pairs that they hold in threadgroup memory.
_PLAN_SIMDGROUPS, _PLAN_PART = 8, 1024
# A plan has room for at least this many tiles, and so at least MIN_ELEMENTS.
_MIN_TILES = MIN_ELEMENTS // 2


class Activation(NamedTuple):
    """kind: "clamped_swiglu" is g sigmoid(alpha g) (u + 1), with g = min(gate, limit) and u = up,
    clamped to -limit and limit; "geglu" has gelu by tanh."""

    kind: ExpertActivation = "swiglu"
    alpha: float = 1.0
    limit: float = 0.0


class ExpertWeight(NamedTuple):
    """The linear layers of all experts.  weight: (experts, outputs, depth), floats or quantised.
    bias: (experts, outputs) or None."""

    weight: Weight
    bias: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """gate and up: (experts, intermediate, hidden); down: (experts, hidden, intermediate).

    up: None if the activation takes only the product of `gate`.
    """

    gate: ExpertWeight
    up: ExpertWeight | None
    down: ExpertWeight
    activation: Activation

    @property
    def parts(self) -> tuple[ExpertWeight, ...]:
        return tuple(part for part in (self.gate, self.up, self.down) if part is not None)

    @property
    def count(self) -> int:
        return self.gate.weight.shape[0]

    @property
    def shape(self) -> ExpertShape:
        count, inner, hidden = self.gate.weight.shape
        gate, down = (shape_of(part.weight).quantisation for part in (self.gate, self.down))
        biased = any(part.bias is not None for part in self.parts)
        return ExpertShape(count, hidden, inner, self.activation.kind, biased, gate, down)


class ExpertPlan(NamedTuple):
    """Pairs sorted by expert, and their tiles (metal/expert_plan.metal).

    array: int32 values.  num_tiles: the largest possible number of tiles.  tile: the most pairs in
    one tile.
    """

    array: mx.array
    num_tiles: int
    tile: int


def experts_problem(experts: Experts) -> str | None:
    """Why the kernels cannot serve these experts for rows of any type, or None if they can."""
    for part in experts.parts:
        if not readable(part.weight):
            how = shape_of(part.weight).quantisation
            described = f"{part.weight.shape} {part.weight.dtype}" + (f" ({how})" if how else "")
            return f"the kernels do not read weights {described}"
    other = experts.up or experts.gate
    gate, up, down = experts.gate.weight, other.weight, experts.down.weight
    if gate.shape != up.shape or down.shape != (gate.shape[0], gate.shape[2], gate.shape[1]):
        return f"experts of {gate.shape}, {up.shape} and {down.shape} do not fit each other"
    if shape_of(gate) != shape_of(up) or (experts.gate.bias is None) != (other.bias is None):
        return "gate and up differ in type, quantisation or bias"
    if gate.shape[0] > MAX_EXPERTS:
        return f"{gate.shape[0]} experts are more than {MAX_EXPERTS}"
    return None


def serves(x: mx.array, indices: mx.array, experts: Experts) -> bool:
    """Whether `expert_mlp` serves x (rows, hidden) and indices (rows, top_k) of served experts."""
    arrays = [a for part in experts.parts for a in (part.weight, part.bias) if a is not None]
    dtypes = {a.dtype for a in arrays if a.dtype is not None}
    return (
        1 <= len(x) <= MAX_ROWS
        and indices.size * max(experts.down.weight.shape[1:]) <= _MAX_ELEMENTS
        and x.dtype in (mx.float16, mx.bfloat16)
        and dtypes <= {x.dtype}
        and x.shape[1] == experts.gate.weight.shape[2]
    )


def expert_mlp(
    x: mx.array, indices: mx.array, experts: Experts, num_live: mx.array | None = None
) -> mx.array:
    """The result of each row's experts (rows * top_k, hidden), in the order of `indices`.

    x: (rows, hidden).  indices: (rows, top_k) integers, the experts of each row.  Both as `serves`
    allows.  num_live: (1,) int32, 1 or more: the number of leading rows that are not padding;
    by default all.  Padding rows read no expert; their result is zero.  Sums are in float32;
    results are rounded where mlx-lm's operations round, quantised weights as by `mx.dequantize`.
    """
    where = indices.reshape(-1), plan_experts(indices, experts.count, num_live)
    up, activation, top_k = experts.up, experts.activation, indices.shape[1]
    inner = expert_product(x, *where, experts.gate, up=up, activation=activation, share=top_k)
    return expert_product(inner, *where, experts.down)


def plan_experts(
    indices: mx.array, num_experts: int, num_live: mx.array | None = None
) -> ExpertPlan:
    """The plan for indices (rows, top_k), distinct in each row.  num_live: see `expert_mlp`."""
    num_rows, top_k = indices.shape
    pairs = indices.size
    if num_rows == 1:  # no padding, and each pair is a tile: nothing depends on the device
        return ExpertPlan(_single(pairs), pairs, _TILES[0])
    tile = next((t for t in _TILES if num_rows <= t), _TILES[-1])
    num_tiles = most_tiles(pairs, num_experts, tile)
    template: Template = {"EXPERTS": num_experts, "TOP_K": top_k, "PART": _PLAN_PART, "TILE": tile}
    template |= {"MIN_TILES": _MIN_TILES, "SIMDGROUPS": _PLAN_SIMDGROUPS}
    size = pairs + 2 * max(_MIN_TILES, num_tiles)
    inputs = [indices.reshape(-1), _no_padding() if num_live is None else num_live]
    (array,) = _PLAN(inputs, template, (1, 1, 1), 32 * _PLAN_SIMDGROUPS, [((size,), mx.int32)])
    return ExpertPlan(array, num_tiles, tile)


def most_tiles(pairs: int, num_experts: int, tile: int) -> int:
    """The most tiles that `pairs` can need: each used expert, and padding, has at most one tile
    that is not full."""
    used = min(pairs, num_experts + 1)
    return min(pairs, (pairs + used * (tile - 1)) // tile)


@cache
def _no_padding() -> mx.array:
    num_live = mx.array([MAX_ROWS], mx.int32)
    mx.eval(num_live)
    return num_live


@cache
def _single(pairs: int) -> mx.array:
    """The plan of one row."""
    order = list(range(pairs))
    plan = order + [n for pair in order for n in (pair, 1)]
    array = mx.array(plan + [0] * (MIN_ELEMENTS - len(plan)), mx.int32)
    mx.eval(array)
    return array


def product_plan(tile: int, weight: WeightShape) -> GemmPlan:
    """The plan for tiles of at most `tile` pairs.

    There are many threadgroups, so each has few simdgroups, and no more than it has loads.  With
    many pairs, the rows of x take the registers for loads.
    """
    spread = spread_of(weight)
    loads = max(1, weight.depth // (32 * spread))
    simdgroups = min(8, 1 << (loads.bit_length() - 1))
    at_once = 4 if weight.quantisation is None and tile <= 16 else 2
    in_lanes = multiplies_in_lanes(tile, weight)
    return GemmPlan(simdgroups, min(at_once, loads // simdgroups), spread, _COLUMNS, in_lanes)


def expert_product(
    x: mx.array,
    indices: mx.array,
    expert_plan: ExpertPlan,
    weight: ExpertWeight,
    *,
    up: ExpertWeight | None = None,
    activation: Activation | None = None,
    share: int = 1,
    plan: GemmPlan | None = None,
) -> mx.array:
    """The product (pairs, outputs) of each pair's row of x with its expert's weight.

    x: (pairs / share, depth).  indices: (pairs,).  activation: applied to the product.  up: the
    result is then multiplied by the product with `up`.
    """
    _, outputs, depth = weight.weight.shape
    plan = plan or product_plan(expert_plan.tile, shape_of(weight.weight))
    arrays, weight_values = _inputs(weight)
    up_arrays = _inputs(up)[0] if up else [None] * 4
    row_tiles, lane_rows = -(-expert_plan.tile // 8), expert_plan.tile if plan.in_lanes else 0
    template: Template = {"T": x.dtype, **weight_values, "SPREAD": plan.spread, "DEPTH": depth}
    template |= {"ROW_TILES": row_tiles, "LANE_ROWS": lane_rows, "SIMDGROUPS": plan.simdgroups}
    template |= {"AT_ONCE": plan.at_once, "SHARE": share, "BIAS": weight.bias is not None}
    kind, alpha, limit = activation or (None, 0.0, 0.0)
    template |= {"ACTIVATION": _ACTIVATIONS[kind], "ALPHA": bits(alpha), "LIMIT": bits(limit)}
    columns = _COLUMNS // 2 if up else _COLUMNS
    inputs = [x, indices, expert_plan.array, *arrays, *up_arrays]
    grid, threads = (-(-outputs // columns), expert_plan.num_tiles, 1), 32 * plan.simdgroups
    return _GEMM(inputs, template, grid, threads, [((len(indices), outputs), x.dtype)])[0]


def _inputs(of: ExpertWeight) -> tuple[list[mx.array | None], Template]:
    arrays, weight_values = inputs_of(of.weight)
    return [*arrays, of.bias], weight_values


def expert_sum(x: mx.array, weights: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
    """The sum (rows, hidden) of x (rows * top_k, hidden) times weights (rows, top_k), by row.

    Products and the sum are rounded to the type of x times weights, then to dtype, if given.
    hidden: a multiple of 4.
    """
    rows, top_k = weights.shape
    check_array("x", x, (rows * top_k, x.shape[1] // 4 * 4))
    product = x.dtype if weights.dtype == x.dtype else mx.float32
    threads, groups = grid_for(x.shape[1] // 4)
    result = dtype or product
    template: Template = {"T": x.dtype, "P": product, "Y": result, "TOP_K": top_k}
    grid, shape = (groups, rows, 1), (rows, x.shape[1])
    return _SUM([x, weights], template, grid, threads, [(shape, result)])[0]
