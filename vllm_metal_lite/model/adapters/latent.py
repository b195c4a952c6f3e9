"""Latent attention for models whose latents mlx-lm expands, and up-projections per head.

DeepSeek V2, MiniCPM 3 and Youtu project one latent and one rotary key per token, like DeepSeek V3.
mlx-lm caches the expanded heads, which are many times larger.  The classes here store the latents
and absorb the up-projection into queries and outputs (DeepSeek-V2, arXiv 2405.04434, section 2.1).
Equal up to the order of the sums.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import deepseek_v2, minicpm3, mla, youtu_llm

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.seam.layer_cache import LatentScores, PagedLayerCache


class LatentAttention(nn.Module):
    """Mixin for mlx-lm classes that cache expanded heads; unchanged outside packed forwards."""

    @property
    def kept_dims(self) -> tuple[int, int, int]:
        """(heads, width of K, width of V) in the store: one latent, one rotary key."""
        return 1, self.kv_lora_rank, self.qk_rope_head_dim

    def adapt(self) -> None:
        """Split the up-projection into those of keys and values, (H, dim, rank) each."""
        up = self.kv_b_proj
        weight = up.weight
        if isinstance(up, nn.QuantizedLinear):
            how = up.group_size, up.bits, up.mode
            weight = mx.dequantize(weight, up.scales, up.get("biases"), *how)
        weight = weight.reshape(self.num_heads, -1, self.kv_lora_rank)
        keys, values = mx.split(weight, [self.qk_nope_head_dim], axis=1)
        self.up_keys, self.up_values = mx.contiguous(keys), mx.contiguous(values)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, PagedLayerCache):
            return super().__call__(x, mask, cache)
        n, heads = x.shape[0], self.num_heads
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_pe = mx.split(q.reshape(n, heads, 1, -1), [self.qk_nope_head_dim], axis=-1)
        latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        latent = mx.expand_dims(self.kv_a_layernorm(latent), axis=1)
        k_pe = k_pe.reshape(n, 1, 1, -1)
        q_pe, k_pe = (self.rope(a, offset=cache.offset) for a in (q_pe, k_pe))
        cache.update_and_fetch(latent, k_pe)
        scale = getattr(self, "scale", None) or self.softmax_scale
        q = by_head(q_nope, self.up_keys)
        out = cache.attend(q, scale, LatentScores(cache, q_pe * scale))
        out = by_head(out, self.up_values.swapaxes(1, 2))
        return self.o_proj(out.reshape(n, 1, -1))


def by_head(x: mx.array, weight: mx.array) -> mx.array:
    """(N, H, 1, A) times (H, A, B): one product per head, not one per row and head."""
    return (x.squeeze(2).swapaxes(0, 1) @ weight).swapaxes(0, 1)[:, :, None]


def _rows_last(base: type) -> type:
    """Per-head up-projections that multiply packed rows (N, H, 1, A) as (H, N, A)."""

    def call(self: nn.Module, x: mx.array, transpose: bool = True) -> mx.array:
        if x.ndim != 4 or x.shape[2] != 1 or x.shape[0] == 1:
            return base.__call__(self, x, transpose)
        out = base.__call__(self, x.squeeze(2).swapaxes(0, 1), transpose)
        return out.swapaxes(0, 1)[:, :, None]

    return type(base.__name__, (base,), {"__call__": call})


_EXPANDING = (deepseek_v2.DeepseekV2Attention, minicpm3.Attention, youtu_llm.YoutuLLMAttention)

ADAPTERS: dict[type, type] = {
    **{base: type(base.__name__, (LatentAttention, base), {}) for base in _EXPANDING},
    mla.MultiLinear: _rows_last(mla.MultiLinear),
    mla.QuantizedMultiLinear: _rows_last(mla.QuantizedMultiLinear),
}
