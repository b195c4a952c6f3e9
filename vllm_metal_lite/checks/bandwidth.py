"""How fast this device moves bytes: in a copy, in MLX's own operations, and in the kernels."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.load import TimedStore
from vllm_metal_lite.kernels import timing
from vllm_metal_lite.kernels.skinny_gemm import skinny_gemm
from vllm_metal_lite.kernels.weights import quantised
from vllm_metal_lite.specs import AttentionShape, Quantisation


@dataclass(frozen=True)
class BandwidthSizes:
    """copy: bytes, also the most of the decodes' K and V.  batch, context: of the decodes.
    width: of square products."""

    copy: int = 256 << 20
    batch: int = 16
    context: int = 4096
    width: int = 8192


def measure(
    shape: AttentionShape, sizes: BandwidthSizes, progress: Callable[[str], object] = lambda _: None
) -> dict[str, float]:
    """Bytes per second, by name: a copy, decodes from the store, MLX's attention, and products.

    shape: with equal head sizes for K and V.
    """
    progress("a copy")
    copy = copy_bandwidth(sizes.copy)
    progress("decodes from the store")
    per_token = 2 * shape.num_kv_heads * shape.k_head_dim * shape.dtype.size
    batch = max(1, min(sizes.batch, sizes.copy // (sizes.context * per_token)))
    sdpa, decode = _attention(shape, batch, sizes.context)
    progress("products")
    mlx, by_words, skinny = _products(shape.dtype, sizes.width)
    return {
        "a copy": copy,
        "MLX's attention, contiguous K and V": sdpa,
        "decodes, K and V of the store": decode,
        "MLX's product, weights in 16 bits": mlx,
        "MLX's product, weights in 4 bits": by_words,
        **{
            f"products of 8 rows, weights in {bits} bits": speed
            for bits, speed in zip((16, 4), skinny, strict=False)
        },
    }


def seconds_per_call(
    call: Callable[[mx.array], mx.array], x: mx.array, chain: int = 100, compiled: bool = True
) -> float:
    """Seconds of x = call(x), in chains, which keep the stream busy.

    Compiled, as decode steps are, the time excludes building the graph.
    """

    def run(x: mx.array) -> mx.array:
        for _ in range(chain):
            x = call(x)
        return x

    run = mx.compile(run) if compiled else run

    def chains(count: int) -> None:
        for _ in range(count):
            mx.eval(run(x))

    return timing.seconds_alternating([chains])[0] / chain


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes read plus written per second by an elementwise operation on `size` bytes."""
    x = mx.zeros(size // 4, mx.float32)
    mx.eval(x)
    return 2 * size / seconds_per_call(lambda a: a + 1, x, chain=5, compiled=False)


def _attention(shape: AttentionShape, batch: int, context: int) -> tuple[float, float]:
    """Bytes of K and V per second: MLX's own attention, on contiguous K and V, and decodes."""
    load = TimedStore(shape, batch, context)
    q = load.queries()
    of_sdpa = q[:, :, None]
    dims = batch, shape.num_kv_heads, context, shape.k_head_dim
    k, v = (mx.random.normal(dims).astype(shape.dtype) for _ in range(2))
    mx.eval(k, v, of_sdpa)

    def sdpa(q: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=load.scale)

    size = batch * context * load.spec.bytes_per_token
    by_mlx = min(seconds_per_call(sdpa, of_sdpa, compiled=compiled) for compiled in (True, False))
    ours = seconds_per_call(load.by("gather"), q)
    return size / by_mlx, size / ours


def _products(dtype: mx.Dtype, width: int) -> tuple[float, float, list[float]]:
    """Bytes of weights per second: MLX's product of 8 rows, its quantised one of one row, and
    `skinny_gemm` of 8 rows, plain and quantised (not in float32)."""
    x = mx.random.normal((8, width)).astype(dtype)
    w = (mx.random.normal((width, width)) / width**0.5).astype(dtype)
    packed = quantised(w, Quantisation(4, 64))
    mx.eval(x, w, packed.arrays)

    def quantised_product(x: mx.array) -> mx.array:
        words, scales, biases = packed.words, packed.scales, packed.biases
        return mx.quantized_matmul(x, words, scales, biases, group_size=64, bits=4)

    def speed(size: int, product: Callable[[mx.array], mx.array], rows: int = 8) -> float:
        return size / seconds_per_call(product, x[:rows], chain=10)

    size = sum(a.nbytes for a in packed.arrays)
    by_mlx, by_words = speed(w.nbytes, lambda x: x @ w.T), speed(size, quantised_product, 1)
    if dtype == mx.float32:
        return by_mlx, by_words, []
    skinny = speed(w.nbytes, lambda x: skinny_gemm(x, w))
    return by_mlx, by_words, [skinny, speed(size, lambda x: skinny_gemm(x, packed))]
