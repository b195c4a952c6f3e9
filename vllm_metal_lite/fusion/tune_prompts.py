"""Decides by timing whether the mixtures of experts of prompts run by `expert_gemm`.

Mixtures are timed alone: a step of so many rows takes seconds, and the host is no part of its time.
"""

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.fusion.experts import fusing
from vllm_metal_lite.kernels import timing
from vllm_metal_lite.kernels.experts import MAX_ROWS
from vllm_metal_lite.kernels.remembered import timed_once
from vllm_metal_lite.model.experts import MIXTURES, served
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.specs import ExpertShape

# Rows of the prompt, and experts that each chooses, as many as gpt-oss and GLM have.
_ROWS, _TOP_K = 512, 4
# The median of so many calls, or of fewer, to stay within _ENOUGH seconds.
_CALLS, _ENOUGH = 5, 0.75


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
    def measure() -> str:
        by_kernels, by_mlx = _seconds(layer, shape, dtype, ranks)
        return "faster" if by_kernels < by_mlx else "slower"

    key = f"prompts with {shape}, {dtype}"
    return timed_once(key, "expert_gemm", "experts of prompts", measure, ranks) == "faster"


def _seconds(
    layer: nn.Module, shape: ExpertShape, dtype: mx.Dtype, ranks: RankGroup
) -> list[float]:
    """Seconds of a mixture and its weighted sum, with the kernels and without."""
    rng, top_k = np.random.default_rng(0), min(_TOP_K, shape.experts)
    chosen = rng.random((1, _ROWS, shape.experts)).argpartition(top_k - 1)[..., :top_k]
    indices, weights = mx.array(chosen.astype(np.uint32)), mx.full(chosen.shape, 1 / top_k)
    x = mx.random.normal((1, _ROWS, shape.hidden), dtype)
    mx.eval(x, indices, weights)

    def way(rows: range) -> timing.Way:
        def run(count: int) -> None:
            for _ in range(count):
                with fusing(rows):
                    mx.eval((layer(x, indices) * weights[..., None]).sum(axis=-2))

        return run

    ways = [way(range(1, MAX_ROWS + 1)), way(range(0))]
    return timing.seconds_in_turns(ways, rounds=_CALLS, enough=_ENOUGH, warm=1, ranks=ranks)
