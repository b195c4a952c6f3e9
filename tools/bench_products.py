"""Products of few rows with the weights of two models' layers: `skinny_gemm` beside MLX's own.

A section of bench_kernels.py.
"""

from collections.abc import Callable

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import measure
from vllm_metal_lite.kernels.skinny_gemm import skinny_gemm

# (outputs, depth) of q, k and v; o; gate and up; down.
LAYERS = {
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Qwen3-4B": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),
}
ROWS = (2, 8, 16, 32, 64)
_WEIGHT_BYTES = 200 << 20  # together, of one shape: no cache holds them
_CHAIN = 100  # products, about


def products() -> bool:
    """us a product, from compiled chains over many weights of one shape.

    So that each product waits for the one before it, one of its numbers is added to x; what a chain
    of such additions alone takes is subtracted.
    """
    print("\n## Products of few rows, bfloat16\n")
    print("| model | outputs x depth | rows | skinny_gemm us | MLX us | MLX / skinny_gemm "
          "| GB/s | difference |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    passed = True
    for model, shapes in LAYERS.items():
        for outputs, depth in shapes:
            size = 2 * outputs * depth
            scale = 0.1 * depth**-0.5  # small, or the additions grow
            weights = [
                mx.random.normal((outputs, depth), mx.bfloat16, scale=scale)
                for _ in range(-(-_WEIGHT_BYTES // size))
            ]
            views = [weight.T for weight in weights]
            mx.eval(weights, views)
            for rows in ROWS:
                x = mx.random.normal((rows, depth), mx.bfloat16)
                got, wanted = skinny_gemm(x, weights[0]), x @ views[0]
                error = mx.abs(got.astype(mx.float32) - wanted.astype(mx.float32)).max()
                difference = (error / mx.abs(wanted).max()).item()
                passed &= difference <= 0.01  # of the largest: each is rounded once
                link = _seconds(lambda x, _: x, weights, x)
                ours = _seconds(skinny_gemm, weights, x) - link
                theirs = _seconds(mx.matmul, views, x) - link
                print(
                    f"| {model} | {outputs:,} x {depth:,} | {rows} | {1e6 * ours:.1f} "
                    f"| {1e6 * theirs:.1f} | {theirs / ours:.2f} | {size / ours / 1e9:,.0f} "
                    f"| {difference:.2g} |",
                    flush=True,
                )
    return passed


def _seconds(
    product: Callable[[mx.array, mx.array], mx.array], weights: list[mx.array], x: mx.array
) -> float:
    def once(x: mx.array) -> mx.array:
        for weight in weights:
            x = x + product(x, weight)[:1, :1]
        return x

    chain = -(-_CHAIN // len(weights))
    return measure.seconds_per_call(once, x, chain) / len(weights)
