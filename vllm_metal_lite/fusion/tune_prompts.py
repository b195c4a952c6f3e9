"""Decides by timing whether mixtures of experts take prompts by the kernels.

A mixture is timed alone: a step of as many rows takes seconds, and the host does not matter.  So
each rank times its own mixtures.
"""

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.current import NO_ROWS
from vllm_metal_lite.fusion.launches import FusedLaunches
from vllm_metal_lite.kernels import timing
from vllm_metal_lite.kernels.experts import MAX_ROWS
from vllm_metal_lite.kernels.findings import timed_once
from vllm_metal_lite.model.experts import MIXTURES, served
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.model.seam.hooks import building
from vllm_metal_lite.specs import ExpertShape

# Rows of a prompt, and the experts of each row, as in gpt-oss and GLM.
_ROWS, _TOP_K = 512, 4
# With the kernels and without: the median of _ROUNDS, or of fewer beyond _ENOUGH seconds.
_ROUNDS, _ENOUGH = 5, 0.75


def faster_prompts(packed: PackedModel) -> bool:
    """Whether each of the model's mixtures of experts takes a prompt faster by the kernels.

    Measured once for each type of a mixture, then remembered.  If timing fails, mlx-lm's code
    serves prompts, with a warning.
    """
    layers: dict[ExpertShape, nn.Module] = {}
    for _, layer in packed.model.named_modules():
        if isinstance(layer, MIXTURES) and (experts := served(layer)):
            layers.setdefault(experts.shape, layer)
    dtype = packed.layout.dtype
    return all(_faster_prompt(layer, shape, dtype) for shape, layer in layers.items())


def _faster_prompt(layer: nn.Module, shape: ExpertShape, dtype: mx.Dtype) -> bool:
    def measure() -> str:
        by_kernels, by_mlx = _mixture_seconds(layer, shape, dtype)
        return "faster" if by_kernels < by_mlx else "slower"

    key = f"prompts with {shape}, {dtype}"
    return timed_once(key, "expert_gemm", "experts of prompts", measure) == "faster"


def _mixture_seconds(layer: nn.Module, shape: ExpertShape, dtype: mx.Dtype) -> list[float]:
    """Seconds of a mixture and its weighted sum, with the kernels and without."""
    rng, top_k = np.random.default_rng(0), min(_TOP_K, shape.experts)
    chosen = rng.random((1, _ROWS, shape.experts)).argpartition(top_k - 1)[..., :top_k]
    indices, weights = mx.array(chosen.astype(np.uint32)), mx.full(chosen.shape, 1 / top_k)
    x = mx.random.normal((1, _ROWS, shape.hidden), dtype)
    mx.eval(x, indices, weights)

    def candidate(rows: range) -> timing.Candidate:
        fusion = FusedLaunches(expert_rows=rows)

        def run(count: int) -> None:
            for _ in range(count):
                with building(), fusion.building(None):
                    summed = (layer(x, indices) * weights[..., None]).sum(axis=-2)
                mx.eval(summed)

        return run

    candidates = [candidate(range(1, MAX_ROWS + 1)), candidate(NO_ROWS)]
    return timing.seconds_alternating(candidates, rounds=_ROUNDS, enough=_ENOUGH, warm=1)
