"""Adapters for modules that compute scores, masks, positions or latents without the seam.

Each adapter uses the module's own weights and changes nothing outside packed forwards.  Other such
modules run one segment at a time (kv_segments.py); these are worth the extra speed.

DeepSeek V2, MiniCPM 3 and Youtu project one latent and one rotary key per token, like DeepSeek V3.
mlx-lm caches the expanded heads, which are many times larger.  LatentAttention stores the latents
and absorbs the up-projection into queries and outputs (DeepSeek-V2, arXiv 2405.04434, section 2.1).
Results are equal up to the order of the sums.
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.nn as nn
from mlx_lm.models import deepseek_v2, gemma2, llama4, minicpm3, mla, youtu_llm
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.seam.layer_cache import KVHandle, LatentScores, PagedLayerCache
from vllm_metal_lite.model.seam.recurrent import ShortConv


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


def _project(attention: nn.Module, x: mx.array) -> Iterator[mx.array]:
    """Queries, keys and values of x (B, L, hidden), each (B, heads, L, head_dim)."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    counts = attention.n_heads, attention.n_kv_heads, attention.n_kv_heads
    for project, count in zip(projections, counts, strict=True):
        yield project(x).reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


class Gemma2Attention(gemma2.Attention):
    """Gemma 2 caps its scores, which MLX's SDPA does not support."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, PagedLayerCache):
            return super().__call__(x, mask, cache)
        q, k, v = _project(self, x)
        rope: Any = self.rope  # also takes an array of offsets, despite its annotation
        q, k = rope(q, offset=cache.offset), rope(k, offset=cache.offset)
        keys: KVHandle = cache.update_and_fetch(k, v)[0]
        out = keys.cache.attend(q, self.scale, mask, softcap=self.attn_logit_softcapping)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


class Llama4Body(llama4.LlamaModel):
    """Llama 4 builds its own chunk masks; the store's layers know their chunks."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if cache is None or not isinstance(cache[0], PagedLayerCache):
            return super().__call__(inputs, cache)
        h = self.embed_tokens(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h = layer(h, None, cache=layer_cache)
        return self.norm(h)


class Llama4Attention(llama4.Attention):
    """Layers without RoPE scale queries by position, which is an array in packed steps."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, PagedLayerCache):
            return super().__call__(x, mask, cache)
        q, k, v = _project(self, x)
        if self.use_rope:
            q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        elif self.attn_temperature_tuning:
            steps = mx.floor((cache.offset + 1) / self.floor_scale)
            scales = mx.log(steps + 1) * self.attn_scale + 1
            q = (q * scales[:, None, None, None]).astype(q.dtype)
        if self.use_qk_norm:
            q, k = (mx.fast.rms_norm(a, weight=None, eps=1e-6) for a in (q, k))
        cache.update_and_fetch(k, v)
        out = cache.attend(q, self.scale)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


class DynamicRoPE(DynamicNTKScalingRoPE):
    """The base grows with the length of each request, but only beyond the trained context.

    `rotation_limit` keeps packed steps within that context, where all rows share the plain base.
    """

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if not isinstance(offset, mx.array):
            return super().__call__(x, offset)
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=self.base, scale=1.0, offset=offset
        )


def rotation_limit(model: nn.Module) -> int | None:
    """The longest context in which all requests share the model's rotations, or None if there is no
    limit."""
    ropes = (m for m in model.modules() if isinstance(m, DynamicNTKScalingRoPE))
    return min((rope.max_position_embeddings for rope in ropes), default=None)


_ADAPTERS: dict[type[nn.Module], type[nn.Module]] = {
    gemma2.Attention: Gemma2Attention,
    llama4.Attention: Llama4Attention,
    llama4.LlamaModel: Llama4Body,
    DynamicNTKScalingRoPE: DynamicRoPE,
    nn.Conv1d: ShortConv,
    **{base: type(base.__name__, (LatentAttention, base), {}) for base in _EXPANDING},
    mla.MultiLinear: _rows_last(mla.MultiLinear),
    mla.QuantizedMultiLinear: _rows_last(mla.QuantizedMultiLinear),
}


def adapt(model: nn.Module) -> None:
    """Install the adapters that a model needs, in place."""
    for module in model.modules():
        adapter: Callable | None = _ADAPTERS.get(type(module))
        if adapter is not None:
            module.__class__ = adapter
            if hasattr(adapter, "adapt"):
                module.adapt()
