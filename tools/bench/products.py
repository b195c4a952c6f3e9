"""Products of few rows with the weights of models' layers: `skinny_gemm` beside MLX's own.

    python -m tools.bench.products                        bfloat16 and 4 bits
    python -m tools.bench.products --weights 6 8 mxfp4    other weights
    python -m tools.bench.products --plans --rows 1 8     the best of many plans, too
    python -m tools.bench.products --plans lanes --rows 1 2 4 --weights 4
                                                          the plan with and without lanes
    python -m tools.bench.products --small                tiny shapes, on the CPU host without a GPU

Also a section of bench/kernels.py.  Prints Markdown.  Exit code 1 if a product is wrong.
"""

import argparse
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from itertools import product as combinations
from pathlib import Path
from typing import NamedTuple

from tools.bench.lib.alone import Alone
from tools.dev.run_main import run_main
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import measure
from vllm_metal_lite.kernels.skinny_gemm import MAX_LANE_ROWS, GemmPlan, gemm_plan, skinny_gemm
from vllm_metal_lite.kernels.weights import (
    QuantisedWeight,
    Weight,
    bits_of,
    dequantised,
    quantised,
    shape_of,
)
from vllm_metal_lite.specs import Quantisation

# (outputs, depth) of q, k and v; o; gate and up; down; the head.
LAYERS = {
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
    "Qwen3-4B": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
    "Qwen3-30B-A3B": ((5120, 2048), (2048, 4096)),  # attention
}
SMALL = {"small": ((128, 256), (64, 320))}
ROWS = (1, 2, 4, 8, 16, 32, 64)
WEIGHTS: dict[str, Quantisation | None] = {
    "bf16": None,
    "4": Quantisation(4, 64),
    "6": Quantisation(6, 64),
    "8": Quantisation(8, 64),
    "mxfp4": Quantisation(4, 32, "mxfp4"),
    "mxfp8": Quantisation(8, 32, "mxfp8"),
    "nvfp4": Quantisation(4, 16, "nvfp4"),
}
_WEIGHT_BYTES = 200 << 20  # together, of one shape: no cache holds them
_CHAIN = 100  # products, about


class Sizes(NamedTuple):
    """layers, rows: what is measured.  weight_bytes, chain: how long."""

    layers: dict[str, tuple[tuple[int, int], ...]] = LAYERS
    rows: Sequence[int] = ROWS
    weight_bytes: int = _WEIGHT_BYTES
    chain: int = _CHAIN


ALL = Sizes()


def products(
    weights: Sequence[str] = ("bf16", "4"), sizes: Sizes = ALL, plans: str | None = None
) -> bool:
    """us a product, from compiled chains over many weights of one shape.

    So that each product waits for the one before it, one of its numbers is added to x; what a chain
    of such additions alone takes is subtracted.
    """
    print("\n## Products of few rows, bfloat16\n")
    best = " best plan | us |" if plans else ""
    print("| model | weights | outputs x depth | rows | skinny_gemm us | MLX us "
          f"| MLX / skinny_gemm | GB/s | difference |{best}")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |" + " --- | --- |" * bool(plans))
    passed = True
    for kind, (model, shapes) in combinations(weights, sizes.layers.items()):
        for outputs, depth in shapes:
            drawn = _weights(outputs, depth, WEIGHTS[kind], sizes.weight_bytes)
            size = sum(a.nbytes for a in _arrays(drawn[0]))
            for rows in sizes.rows:
                x = mx.random.normal((rows, depth), mx.bfloat16)
                difference = _difference(x, drawn[0])
                passed &= difference <= 0.01  # of the largest: each is rounded once
                link = _seconds(lambda x, _: x, drawn, x, sizes.chain)
                ours = _seconds(skinny_gemm, drawn, x, sizes.chain) - link
                theirs = _seconds(_by_mlx, drawn, x, sizes.chain) - link
                line = (
                    f"| {model} | {kind} | {outputs:,} x {depth:,} | {rows} | {1e6 * ours:.1f} "
                    f"| {1e6 * theirs:.1f} | {theirs / ours:.2f} | {size / ours / 1e9:,.0f} "
                    f"| {difference:.2g} |"
                )
                if plans:
                    plan, seconds = _best(drawn, x, sizes.chain, plans)
                    line += f" {' '.join(map(str, plan))} | {1e6 * (seconds - link):.1f} |"
                print(line, flush=True)
    return passed


def _weights(outputs: int, depth: int, how: Quantisation | None, enough: int) -> list[Weight]:
    scale = 0.1 * depth**-0.5  # small, or the additions grow
    drawn: list[Weight] = []
    while sum(a.nbytes for w in drawn for a in _arrays(w)) < enough or not drawn:
        weight = mx.random.normal((outputs, depth), mx.bfloat16, scale=scale)
        drawn.append(quantised(weight, how) if how else weight)
        mx.eval(_arrays(drawn[-1]))
    return drawn


def _arrays(weight: Weight) -> list[mx.array]:
    return weight.arrays if isinstance(weight, QuantisedWeight) else [weight]


def _by_mlx(x: mx.array, weight: Weight) -> mx.array:
    if not isinstance(weight, QuantisedWeight):
        return x @ weight.T
    bits, group_size, mode = weight.quantisation
    return mx.quantized_matmul(
        x, weight.words, weight.scales, weight.biases, True, group_size, bits, mode
    )


def _difference(x: mx.array, weight: Weight) -> float:
    """From the product in float32, relative to its largest element."""
    plain = weight
    if isinstance(weight, QuantisedWeight):
        plain = mx.array(dequantised(weight)).astype(mx.bfloat16)
    wanted = x.astype(mx.float32) @ plain.astype(mx.float32).T
    error = mx.abs(skinny_gemm(x, weight).astype(mx.float32) - wanted).max()
    return (error / mx.abs(wanted).max()).item()


def _best(weights: Sequence[Weight], x: mx.array, chain: int, plans: str) -> tuple[GemmPlan, float]:
    timed = {}
    for plan in _plans(len(x), weights[0]) if plans == "all" else _lanes(len(x), weights[0]):
        try:
            timed[plan] = _seconds(
                lambda x, w, plan=plan: skinny_gemm(x, w, plan=plan), weights, x, chain
            )
        except Exception as e:  # too many registers or threads, say
            print(f"<!-- {plan}: {type(e).__name__} -->")
    plan = min(timed, key=timed.__getitem__)
    return plan, timed[plan]


def _lanes(rows: int, weight: Weight) -> Iterator[GemmPlan]:
    """The default, and the same with lanes instead of matrices, or the other way round."""
    plan = gemm_plan(rows, shape_of(weight))
    yield plan
    if shape_of(weight).quantisation and rows <= MAX_LANE_ROWS:
        yield plan._replace(in_lanes=not plan.in_lanes)


def _plans(rows: int, weight: Weight) -> Iterator[GemmPlan]:
    """The default, and others with at most 8 chunks in flight and 32 words a lane."""
    shape = shape_of(weight)
    yield gemm_plan(rows, shape)
    bits = bits_of(shape)
    spreads = {16: (1,), 8: (1, 2, 4), 6: (2, 4), 4: (1, 2, 4)}[bits]
    in_lanes = (False, True) if shape.quantisation and rows <= MAX_LANE_ROWS else (False,)
    for plan in combinations((2, 4, 8, 16), (1, 2, 4, 8), spreads, (16, 32), in_lanes):
        simdgroups, at_once, spread, columns, _ = plan
        chunks = at_once * spread
        words = chunks * bits * columns // 64  # of a lane
        if chunks <= 8 and words <= 32 and simdgroups * 32 * spread <= shape.depth:
            yield GemmPlan(*plan)


def _seconds(
    product: Callable[[mx.array, Weight], mx.array],
    weights: Sequence[Weight],
    x: mx.array,
    chain: int,
) -> float:
    def once(x: mx.array) -> mx.array:
        for weight in weights:
            x = x + product(x, weight)[:1, :1]
        return x

    calls = -(-chain // len(weights))
    return measure.seconds_per_call(once, x, calls) / len(weights)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["bf16", "4"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument(
        "--plans", nargs="?", const="all", choices=("all", "lanes"), help="find the best"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="as bench/serving.py has it")
    arguments = parser.parse_args()
    sizes = Sizes({model: LAYERS[model] for model in arguments.models}, arguments.rows)
    if arguments.small:
        sizes = Sizes(SMALL, arguments.rows, weight_bytes=1, chain=1)
    host = nullcontext()
    if backend.is_cpu():
        from metal.host import installed

        host = installed()
    alone = Alone(arguments.beside)
    with host:
        if arguments.beside:  # what compiles for minutes
            with redirect_stdout(io.StringIO()):
                products(arguments.weights, sizes, arguments.plans)
        with alone():
            return 0 if products(arguments.weights, sizes, arguments.plans) else 1


if __name__ == "__main__":
    run_main(main)
