"""Adapters for modules that compute scores, masks or positions without the seam.

Each adapter uses the module's own weights and changes nothing outside packed forwards.  Other such
modules run one segment at a time (sequences/kv_segments.py); these are worth the extra speed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.nn as nn
from mlx_lm.models import gemma2, llama4
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.adapters import latent
from vllm_metal_lite.model.seam.layer_cache import KVHandle, PagedLayerCache
from vllm_metal_lite.model.seam.recurrent import ShortConv


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
    **latent.ADAPTERS,
}


def adapt(model: nn.Module) -> None:
    """Install the adapters that a model needs, in place."""
    for module in model.modules():
        adapter: Callable | None = _ADAPTERS.get(type(module))
        if adapter is not None:
            module.__class__ = adapter
            if hasattr(adapter, "adapt"):
                module.adapt()
