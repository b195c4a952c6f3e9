"""Launches at the shapes of models that people run, in both types of 16 bits."""

from collections.abc import Callable
from functools import partial

from tests.support.kernels import production_shapes
from tests.support.kernels import zero_launches as zero
from vllm_metal_lite.backend import mx
from vllm_metal_lite.specs import Quantisation

# The tests have the others: Qwen3 to 8B and 32B, Llama, Gemma 3, gpt-oss.
_HEADS = (
    zero.Heads("Granite 4 tiny, 3 of 128", 12, 4, 128),
    zero.Heads("Qwen3 14B, 5 of 128", 40, 8, 128),
    zero.Heads("Nemotron 3 Nano, 16 of 128", 32, 2, 128),
    zero.Heads("Qwen3.5 4B and 9B, 4 of 256", 16, 4, 256),
    zero.Heads("Qwen3.5 27B, 6 of 256", 24, 4, 256),
    zero.Heads("Qwen3.6 35B-A3B, 8 of 256", 16, 2, 256),
    zero.Heads("Gemma 4, 8 of 512", 16, 2, 512),
)
_BITS = Quantisation(4, 64)


def _cases() -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {}
    for dtype in (mx.float16, mx.bfloat16):
        kind = str(dtype).removeprefix("mlx.core.")
        for of in (*production_shapes.ALL_HEADS, *_HEADS):
            name = f"{of.name} {kind}"
            cases[f"paged_decode {name}"] = partial(zero.decode, of, dtype)
            cases[f"paged_decode {name} fused"] = partial(zero.decode, of, dtype, fused=True)
            cases[f"rope_write {name}"] = partial(zero.rope, of, dtype)
            if of.dim <= 256:  # prompts of larger heads use MLX's attention
                cases[f"varlen_prefill {name}"] = partial(zero.prefill, of, dtype)
                cases[f"shared_prefix {name} fused"] = partial(zero.prefix, of, dtype, fused=True)
        for rows in (1, 4, 8, 16, 64):
            product = partial(zero.product, rows, 2560, 9728, dtype)
            cases[f"skinny_gemm {rows} {kind}"] = product
            cases[f"skinny_gemm {rows} {kind} 4 bits"] = partial(product, quantisation=_BITS)
            experts = partial(zero.experts, rows, 8, 256, 2048, 512, dtype, _BITS)
            cases[f"expert_gemm Qwen3.6 35B-A3B {rows} {kind} 4 bits"] = experts
        for dim in (1024, 2048, 4096, 5120, 8192, 12288, 16384):
            cases[f"add_rms_norm {dim} {kind}"] = partial(zero.add_norm, dim, dtype, post=True)
    return cases


CASES = production_shapes.CASES | _cases()
