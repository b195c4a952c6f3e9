"""Mixtures of experts that run by our kernels while a fused forward is built; otherwise mlx-lm's.

Only the instances of one model change class, as linear layers do (linear.py).
"""

from typing import Any

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.current import current
from vllm_metal_lite.fusion.origins import Chosen
from vllm_metal_lite.fusion.routing import latest
from vllm_metal_lite.fusion.traced import as_view, rows_of
from vllm_metal_lite.kernels.experts import expert_mlp, fits
from vllm_metal_lite.model.experts import MIXTURES, experts_of, served


def _fused(base: Any) -> type:
    def call(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        indices = latest(indices)
        result = _by_kernels(self, x, indices)
        return base.__call__(self, x, indices) if result is None else result

    return type(base.__name__, (base,), {"__call__": call})


_FUSED = {base: _fused(base) for base in MIXTURES}


def _by_kernels(layer: nn.Module, x: mx.array, indices: mx.array) -> mx.array | None:
    """The result (*indices.shape, hidden); None if mlx-lm's own code must compute it."""
    _, rows, num_live = current()
    if indices.shape[:-1] != x.shape[:-1] or x.size // x.shape[-1] not in rows:
        return None
    experts = experts_of(layer)
    flat, chosen = rows_of(x), rows_of(indices)
    if experts is None or not fits(flat, chosen, experts):
        return None
    result = expert_mlp(flat, chosen, experts, num_live=num_live)
    shape = (*indices.shape, result.shape[-1])
    return as_view(result, shape[:-1], Chosen(result, shape))


def fuse_experts(model: nn.Module) -> None:
    """Prepare the model's mixtures of experts for fused forwards."""
    for _, module in model.named_modules():
        fused = _FUSED.get(type(module))
        if fused is not None and served(module):
            module.__class__ = fused
