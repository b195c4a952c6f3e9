"""Decides by timing whether the mixtures of experts of prompts run by `expert_gemm`.

Mixtures are timed alone: a step of so many rows takes seconds, and the host is no part of its time.
"""

import logging
import time

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.fusion.experts import fusing
from vllm_metal_lite.kernels.experts import MAX_ROWS
from vllm_metal_lite.kernels.remembered import Remembered
from vllm_metal_lite.model.experts import MIXTURES, served
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.specs import ExpertShape

logger = logging.getLogger(__name__)

# Rows of the prompt, and experts that each chooses, as many as gpt-oss and GLM have.
_ROWS, _TOP_K = 512, 4
# The median of so many calls, in turn with and without the kernels, or of fewer, to stay within
# _ENOUGH seconds.
_CALLS, _ENOUGH = 5, 1.5


def faster_prompts(packed: PackedModel, ranks: RankGroup = ALONE) -> bool:
    """Whether each of the model's mixtures of experts takes a prompt faster by the kernels.

    Measured once for each form of a mixture, then remembered.  If timing fails, mlx-lm's code
    serves prompts, with a warning.  ranks: rank 0's timing counts.
    """
    layers: dict[ExpertShape, nn.Module] = {}
    for _, layer in packed.model.named_modules():
        if isinstance(layer, MIXTURES) and (experts := served(layer)):
            layers.setdefault(experts.shape, layer)
    dtype = packed.attention_specs[0].dtype
    return all(_faster(layer, shape, dtype, ranks) for shape, layer in layers.items())


def _faster(layer: nn.Module, shape: ExpertShape, dtype: mx.Dtype, ranks: RankGroup) -> bool:
    found, key = Remembered(), f"prompts with {shape}, {dtype}"
    known = ranks.first(found.known.get(key))
    if known is None:
        logger.info("timing experts of prompts, once on this machine", extra={"transient": True})
        try:
            by_kernels, by_mlx = _seconds(layer, shape, dtype, ranks)
        except Exception as e:  # from a compiler or a driver; the next start may succeed
            logger.warning(f"prompts do not use expert_gemm, which cannot be timed: {one_line(e)}")
            return False
        known = "faster" if by_kernels < by_mlx else "slower"
        found.add(key, known)
    return known == "faster"


def _seconds(
    layer: nn.Module, shape: ExpertShape, dtype: mx.Dtype, ranks: RankGroup
) -> tuple[float, float]:
    """Seconds of a mixture and its weighted sum, with the kernels and without."""
    rng, top_k = np.random.default_rng(0), min(_TOP_K, shape.experts)
    chosen = rng.random((1, _ROWS, shape.experts)).argpartition(top_k - 1)[..., :top_k]
    indices, weights = mx.array(chosen.astype(np.uint32)), mx.full(chosen.shape, 1 / top_k)
    x = mx.random.normal((1, _ROWS, shape.hidden), dtype)
    mx.eval(x, indices, weights)

    def seconds(rows: range) -> float:
        start = time.perf_counter()
        with fusing(rows):
            mx.eval((layer(x, indices) * weights[..., None]).sum(axis=-2))
        return ranks.first(time.perf_counter() - start)

    ways = range(1, MAX_ROWS + 1), range(0)
    for way in ways:
        seconds(way)  # this compiles
    once = sum(seconds(way) for way in ways)
    calls = max(1, min(_CALLS, int(_ENOUGH / once)))
    by_kernels, by_mlx = np.median([[seconds(way) for way in ways] for _ in range(calls)], axis=0)
    return by_kernels, by_mlx
