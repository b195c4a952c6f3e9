"""The peak memory of a vision tower, estimated from its shapes for the plan of memory."""

import math
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.attention.sdpa.fused import unfused
from vllm_metal_lite.devices import profile
from vllm_metal_lite.images.encoder import Encoder, padded_width
from vllm_metal_lite.images.towers import Tower

# How many arrays of a layer are in memory at once, because MLX prepares operations ahead: arrays as
# wide as all heads, half of them in float32, and twice all results of its products.  Measured on a
# CPU: 30 to 36 as wide as all heads in float32.
_OF_HEADS, _OF_PRODUCTS = 20, 2
# The same of a picture's values, in float32.  Measured: 9.6.
_OF_VALUES = 10
# Tiles whose scores are in memory at once, as in runner/step_peak.py; one more if masks are put on.
_TILES_AT_ONCE = 3


def peak_bytes(tower: Tower, num_patches: int) -> int:
    """The bytes that a picture of num_patches needs beyond the tower's weights."""
    item, scores, num_rows = tower.dtype.size, 0, math.ceil(num_patches * tower.fill)
    of_patch = 4 * _OF_VALUES * _num_inputs(tower.embed)
    encoder = tower.get("encoder")
    if isinstance(encoder, Encoder) and encoder.layers:
        layer = encoder.layers[0]
        heads, head_dim = layer.config.num_heads, layer.config.head_dim
        weights = [w for m in layer.modules() if (w := m.get("weight")) is not None and w.ndim == 2]
        of_products = _OF_PRODUCTS * item * sum(w.shape[0] for w in weights)
        of_heads = _OF_HEADS * (item + 4) * heads * head_dim
        of_patch = max(of_patch, of_products, of_heads)
        if unfused(heads, padded_width(head_dim), None) is not None:
            most = (_TILES_AT_ONCE + (tower.fill > 1)) * profile().max_scores
            scores = item * min(heads * num_rows**2, most)
    return num_rows * of_patch + scores


def _num_inputs(layer: Any) -> int:
    """How many values a linear layer takes."""
    width: int = layer.weight.shape[-1]
    return width * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else width
