"""Kernel uses for `doctor` without a model: of popular models; with --full, of many more shapes.

Together the common uses cover heads of 64, 128 and 256, one to eight query heads a KV head,
latents, both 16-bit types, windows, softcaps, sinks, norms of heads, rotations with a factor,
stores of 8 and 4 bits, pictures, and recurrent layers.
"""

import math
from dataclasses import replace
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import BLOCK_SIZES
from vllm_metal_lite.kernels.weight_formats import READABLE
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    GatedNormShape,
    KernelUse,
    Quantisation,
    RecurrenceShape,
    RecurrentShape,
    RopeShape,
    WeightShape,
)

_BLOCK = 16
# gpt-oss's.  No 16-bit type holds it exactly.
YARN_FACTOR = 0.1 * math.log(32) + 1


def _use(
    heads: tuple[int, int],
    dtype: mx.Dtype,
    rope: RopeShape,
    hidden: tuple[int, ...] = (),
    weights: tuple[WeightShape, ...] = (),
    **fields: Any,
) -> KernelUse:
    """heads: query heads and KV heads, rotated whole.  fields: further ones of AttentionShape."""
    shape = AttentionShape(*heads, rope.dims, rope.dims, dtype, **fields)
    return KernelUse((shape,), _BLOCK, (rope,), hidden, weights)


def _weights(*quantisations: Quantisation | None) -> tuple[WeightShape, ...]:
    return tuple(
        WeightShape(*shape, how) for how in quantisations for shape in ((4096, 1024), (1024, 3072))
    )


# The first one is also timed.
COMMON: dict[str, KernelUse] = {
    "Qwen3 0.6B and 1.7B": _use(
        (16, 8), mx.bfloat16, RopeShape(128, base=1e6, eps=1e-6), (1024, 2048),
        _weights(None, Quantisation(4, 64)),
    ),
    "the same, K and V in 8 bits": _use((16, 8), mx.bfloat16, RopeShape(128), kv_bits=8),
    "the same, K and V in 4 bits": _use((16, 8), mx.bfloat16, RopeShape(128), kv_bits=4),
    "Llama 3 8B, Mistral 7B": _use((32, 8), mx.bfloat16, RopeShape(128, base=5e5), (4096,)),
    "Llama 3.2 1B in float16": _use((32, 8), mx.float16, RopeShape(64, base=5e5), (2048,)),
    "SmolLM2 1.7B in float16": _use((32, 32), mx.float16, RopeShape(64, base=1.3e5)),
    "Gemma 2 2B": _use((8, 4), mx.bfloat16, RopeShape(256), (2304,), softcap=50.0),
    "Gemma 3 4B, with pictures": replace(
        _use((8, 4), mx.bfloat16, RopeShape(256, eps=1e-6), window=1024), spans="all"
    ),
    "gpt-oss 20B": _use(
        (64, 8), mx.bfloat16, RopeShape(64, base=None, factor=YARN_FACTOR),
        weights=_weights(Quantisation(8, 64), Quantisation(4, 32, "mxfp4")), window=128, sinks=True,
    ),
    "GLM 4.7 Flash": KernelUse(
        (AttentionShape(20, 1, 512, 64, mx.bfloat16, latent=True),), _BLOCK,
        (RopeShape(64, traditional=True, base=1e6),), (2048,),
    ),
    "recurrent layers of Qwen3.5 4B, LFM2 1.2B and Nemotron-H 8B": KernelUse(
        (), _BLOCK,
        recurrences=(
            ConvShape(8192, 4, False, True, mx.bfloat16),
            RecurrenceShape(16, 32, 128, 128, mx.bfloat16),
            GatedNormShape(128, 32, mx.bfloat16),
            ConvShape(2048, 3, False, False, mx.bfloat16),
            ConvShape(10240, 4, True, True, mx.bfloat16),
            RecurrenceShape(8, 128, 128, 64, mx.bfloat16, delta=False),
            GatedNormShape(1024, 8, mx.bfloat16, gate_first=True),
        ),
    ),
}  # fmt: skip


def full_list() -> list[KernelUse]:
    """Uses that vary each dimension in turn: many more than a model has."""
    heads = ((4, 4), (8, 2), (5, 1), (16, 8), (24, 2), (71, 1))
    dims = ((32, 32), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128),
            (192, 192), (256, 256), (576, 512))  # fmt: skip
    masks = (
        {"window": 20},
        {"softcap": 5.0},
        {"sinks": True},
        {"window": 70, "softcap": 20.0, "sinks": True},
    )
    in_bits = (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)
    latents = (20, 512, 64), (40, 256, 32), (64, 512, 64)
    uses = []
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        shapes = [AttentionShape(*h, 64, 64, dtype) for h in heads]
        shapes += [AttentionShape(4, 2, *d, dtype) for d in dims]
        shapes += [AttentionShape(8, 2, 128, 128, dtype, **mask) for mask in masks]
        shapes += [AttentionShape(8, 2, *d, dtype, kv_bits=b) for b in (8, 4) for d in in_bits]
        for shape in shapes:
            dim = shape.k_head_dim
            partly = RopeShape(dim // 4 * 2, traditional=True, base=None, factor=YARN_FACTOR)
            ropes = RopeShape(dim, eps=1e-5), partly
            uses.append(KernelUse((shape,), _BLOCK, ropes, (shape.num_heads * dim, 1001)))
        shape = AttentionShape(4, 2, 128, 128, dtype)
        uses += [KernelUse((shape,), size) for size in BLOCK_SIZES]
        how = None, *READABLE
        weights = [WeightShape(100, depth, h) for h in how for depth in (128, 1152)]
        uses.append(KernelUse((shape,), _BLOCK, weights=(*weights, WeightShape(100, 96))))
        turns = RopeShape(64, traditional=True), RopeShape(32, base=None)  # of rotary keys
        for count, latent_dim, rope in latents:
            for bits in (None, 8, 4):
                shape = AttentionShape(count, 1, latent_dim, rope, dtype, latent=True, kv_bits=bits)
                uses.append(KernelUse((shape,), _BLOCK, turns))
        recurrences: list[RecurrentShape] = [
            *(ConvShape(*shape, dtype)
              for shape in ((64, 2, False, False), (300, 3, True, False), (2048, 4, False, True))),
            *(RecurrenceShape(*heads, dtype, delta, vector)
              for heads in ((1, 3, 64, 64), (4, 8, 128, 128), (2, 2, 256, 40))
              for delta, vector in ((True, False), (True, True), (False, False))),
            *(GatedNormShape(dim, groups, dtype, first, not first)
              for dim, groups in ((64, 5), (128, 32), (1001, 2), (8192, 1))
              for first in (False, True)),
        ]  # fmt: skip
        uses.append(KernelUse((), _BLOCK, recurrences=tuple(recurrences)))
    return uses
