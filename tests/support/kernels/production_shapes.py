"""The shapes of real models, and the texts of all kernels there: those that the checks launch.

No kernel runs, so real sizes cost little.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from metal.host.texts import KernelText, recorded
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.check import Check, MixtureShape, NormShape, ProductShape
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.popular_shapes import COMMON
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    ExpertShape,
    GatedNormShape,
    KernelUse,
    Quantisation,
    RecurrenceShape,
    RopeShape,
    WeightShape,
)

BF16, HALF, F32 = mx.bfloat16, mx.float16, mx.float32
# (query heads, KV heads, head size) that COMMON lacks.
QWEN3, PHI, GEMMA3 = (16, 8, 128), (32, 32, 80), (8, 4, 256)
OTHERS = (28, 4, 128), (16, 16, 128), (14, 2, 64), (64, 8, 128)
LATENTS = (20, 512, 64), (64, 512, 64), (40, 256, 32)  # heads, latents, rotary part
MXFP4 = Quantisation(4, 32, "mxfp4")


def attention(
    heads: tuple[int, int, int],
    dtype: mx.Dtype,
    bits: int | None = None,
    window: int | None = None,
    shares: bool = False,
) -> KernelUse:
    """The use of a model with norms of heads."""
    *counts, dim = heads
    shape = AttentionShape(*counts, dim, dim, dtype, window, kv_bits=bits)
    return KernelUse((shape,), 16, (RopeShape(dim, base=1e6, eps=1e-6),), shares_prefix=shares)


def _latents(heads: int, dim: int, rope: int, dtype: mx.Dtype, bits: int | None) -> KernelUse:
    shape = AttentionShape(heads, 1, dim, rope, dtype, latent=True, kv_bits=bits)
    return KernelUse((shape,), 16, (RopeShape(rope, traditional=True, base=1e6),))


def _uses() -> Iterator[KernelUse]:
    yield from COMMON.values()
    for heads in OTHERS:
        yield attention(heads, BF16)
    for dtype in (BF16, F32):
        yield attention(PHI, dtype, shares=True)
    for dtype in (HALF, F32):
        yield attention(QWEN3, dtype, shares=True)
    yield attention(GEMMA3, F32, window=1024)
    for bits in (8, 4):
        yield attention(GEMMA3, BF16, bits)
        yield attention(QWEN3, F32, bits)
        yield _latents(*LATENTS[0], BF16, bits)
    yield attention(PHI, HALF, 4)
    yield from (_latents(*latents, BF16, None) for latents in LATENTS[1:])
    for dtype in (BF16, HALF, F32):
        yield _recurrent(dtype)
        yield _latents(*LATENTS[0], dtype, None)


def _recurrent(dtype: mx.Dtype) -> KernelUse:
    return KernelUse(
        (),
        16,
        recurrences=(
            ConvShape(8192, 4, False, True, dtype),  # Qwen3-Next
            ConvShape(5376, 4, True, True, dtype),  # Mamba 2
            ConvShape(2048, 3, False, False, dtype),  # LFM2
            GatedNormShape(128, 32, dtype),  # Qwen3-Next
            GatedNormShape(1024, 8, dtype, gate_first=True),  # Nemotron-H
            GatedNormShape(5120, 1, dtype, gate_first=True),  # Mamba 2
            RecurrenceShape(16, 32, 128, 128, dtype),  # Qwen3-Next
            RecurrenceShape(32, 32, 128, 128, dtype, vector=True),  # Kimi Linear
            RecurrenceShape(30, 30, 96, 192, dtype),
            RecurrenceShape(8, 16, 256, 256, dtype),
            RecurrenceShape(1, 80, 128, 64, dtype, delta=False),  # Mamba 2
            RecurrenceShape(8, 128, 128, 64, dtype, delta=False),  # Nemotron-H
            RecurrenceShape(1, 24, 256, 128, dtype, delta=False),  # Falcon-H1
        ),
    )


def products(
    rows: int, outputs: int, depth: int, dtype: mx.Dtype, how: Quantisation | None = None
) -> list[Check]:
    """A product with a norm, SwiGLU and a residual sum; and one with a bias and GeGLU."""
    weight = WeightShape(outputs, depth, how)
    shapes = [ProductShape(rows, weight, dtype, biased) for biased in (False, True)]
    return [Check("skinny_gemm", shape) for shape in shapes]


def experts(*shape: Any, dtype: mx.Dtype = BF16) -> list[Check]:
    """The kernels of a mixture of experts.  shape: as in ExpertShape."""
    use = replace(attention(QWEN3, dtype), experts=(ExpertShape(*shape),))
    return [check for check in checks_for(use) if isinstance(check.shape, MixtureShape)]


def norms(size: int, dtype: mx.Dtype) -> list[Check]:
    """The kernels of rows with a hidden size."""
    use = replace(attention(QWEN3, dtype), hidden_sizes=(size,))
    return [check for check in checks_for(use) if isinstance(check.shape, NormShape)]


def _checks() -> Iterator[Check]:
    for use in _uses():
        yield from checks_for(use)
    for size in (1024, 2560, 5120, 4099):
        for dtype in (BF16, F32):
            yield from norms(size, dtype)
    for rows in (1, 8, 20, 64):
        yield from products(rows, 4096, 1024, BF16)
    for bits in (4, 6, 8):
        for rows in (1, 8, 64):
            yield from products(rows, 19456, 2560, BF16, Quantisation(bits, 64))
        yield from products(8, 1024, 1024, HALF, Quantisation(bits, 64))
    for how in (MXFP4, Quantisation(8, 32, "mxfp8"), Quantisation(4, 16, "nvfp4")):
        yield from products(8, 5120, 2880, BF16, how)
    yield from products(16, 20480, 2560, BF16, Quantisation(4, 32))
    yield from products(64, 16384, 2048, HALF)
    affine = {bits: (Quantisation(bits, 64),) * 2 for bits in (4, 6, 8)}
    for formats in ((), affine[4]):
        yield from experts(128, 2048, 768, "swiglu", False, *formats)  # Qwen3-30B-A3B
    yield from experts(256, 2048, 512, "swiglu", False, *affine[4])  # Qwen3.5-35B-A3B
    yield from experts(32, 2880, 2880, "clamped_swiglu", True, MXFP4, MXFP4)  # gpt-oss-20b
    for bits in (6, 8):  # GLM-4.7-Flash
        yield from experts(64, 2048, 1536, "swiglu", False, *affine[bits], dtype=HALF)
    yield from experts(128, 2688, 1856, "relu2", False, *affine[4])  # Nemotron-3-Nano


CHECKS = {str(check): check for check in _checks()}


def texts_of(check: Check) -> list[KernelText]:
    """The texts that a check launches, on arrays of zeros."""
    with recorded() as recording:
        assert run(check).failure is None
        return recording.texts()


def all_texts() -> list[KernelText]:
    """The distinct texts of all checks."""
    return list(dict.fromkeys(text for check in CHECKS.values() for text in texts_of(check)))
