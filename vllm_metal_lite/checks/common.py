"""What the models that people run most ask of the kernels: the checks of `doctor` without a model.

Together they cover heads of 64, 128 and 256, one to eight query heads a KV head, both 16-bit types,
windows, softcaps, sinks, norms of heads, rotations with a factor, stores of 8 and 4 bits, and
recurrent layers.
"""

import math

from vllm_metal_lite.backend import mx
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    GatedNormShape,
    KernelUse,
    Quantisation,
    RecurrenceShape,
    Rotation,
    WeightShape,
)

_BLOCK = 16
# gpt-oss's.  No 16-bit type holds it exactly.
YARN_FACTOR = 0.1 * math.log(32) + 1


def _use(
    heads: tuple[int, int, int],
    dtype: mx.Dtype,
    *,
    base: float | None = 10_000.0,
    factor: float = 1.0,
    eps: float | None = None,
    hidden: tuple[int, ...] = (),
    weights: tuple[WeightShape, ...] = (),
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    kv_bits: int | None = None,
) -> KernelUse:
    """heads: query heads, KV heads and their size."""
    num_heads, num_kv_heads, dim = heads
    shape = AttentionShape(
        num_heads, num_kv_heads, dim, dim, dtype,
        window=window, softcap=softcap, sinks=sinks, kv_bits=kv_bits,
    )  # fmt: skip
    rotation = Rotation(dim, base=base, eps=eps, factor=factor)
    return KernelUse((shape,), _BLOCK, (rotation,), hidden, weights)


def _weights(*quantisations: Quantisation | None) -> tuple[WeightShape, ...]:
    return tuple(
        WeightShape(*shape, how) for how in quantisations for shape in ((4096, 1024), (1024, 3072))
    )


# The first one is also timed.
COMMON: dict[str, KernelUse] = {
    "Qwen3 0.6B and 1.7B": _use(
        (16, 8, 128), mx.bfloat16, base=1e6, eps=1e-6, hidden=(1024, 2048),
        weights=_weights(None, Quantisation(4, 64)),
    ),
    "the same, K and V in 8 bits": _use((16, 8, 128), mx.bfloat16, kv_bits=8),
    "the same, K and V in 4 bits": _use((16, 8, 128), mx.bfloat16, kv_bits=4),
    "Llama 3 8B, Mistral 7B": _use((32, 8, 128), mx.bfloat16, base=5e5, hidden=(4096,)),
    "Llama 3.2 1B in float16": _use((32, 8, 64), mx.float16, base=5e5, hidden=(2048,)),
    "SmolLM2 1.7B in float16": _use((32, 32, 64), mx.float16, base=1.3e5),
    "Gemma 2 2B": _use((8, 4, 256), mx.bfloat16, softcap=50.0, hidden=(2304,)),
    "Gemma 3 1B": _use((4, 1, 256), mx.bfloat16, eps=1e-6, window=512),
    "gpt-oss 20B": _use(
        (64, 8, 64), mx.bfloat16, base=None, factor=YARN_FACTOR, window=128, sinks=True,
        weights=_weights(Quantisation(8, 64), Quantisation(4, 32, "mxfp4")),
    ),
    "GLM 4.7 Flash": KernelUse(
        (AttentionShape(20, 1, 512, 64, mx.bfloat16, latent=True),), _BLOCK,
        (Rotation(64, traditional=True, base=1e6),), (2048,),
    ),
    "recurrent layers of Qwen3.5 4B, LFM2 1.2B and Nemotron-H 8B": KernelUse(
        (), _BLOCK,
        recurrences=(
            ConvShape(8192, 4, False, True, mx.bfloat16),
            RecurrenceShape(16, 32, 128, 128, mx.bfloat16, fused=True),
            GatedNormShape(128, 32, mx.bfloat16),
            ConvShape(2048, 3, False, False, mx.bfloat16),
            ConvShape(10240, 4, True, True, mx.bfloat16),
            RecurrenceShape(8, 128, 128, 64, mx.bfloat16, delta=False, fused=True),
            GatedNormShape(1024, 8, mx.bfloat16, gate_first=True),
        ),
    ),
}  # fmt: skip
