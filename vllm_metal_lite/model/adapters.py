"""Attention modules that compute their scores by hand, taught to ask the seam instead.

One class an architecture, with the module's own weights; outside a packed forward it is the
original.
"""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from mlx_lm.models import gemma2

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.seam import KVHandle, PagedLayerCache


class Gemma2Attention(gemma2.Attention):
    """Gemma 2 caps its scores, which SDPA cannot; ours can."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, PagedLayerCache):
            return super().__call__(x, mask, cache)
        b, n, _ = x.shape
        q, k, v = (
            project(x).reshape(b, n, heads, -1).transpose(0, 2, 1, 3)
            for project, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        keys: KVHandle = cache.update_and_fetch(k, v)[0]
        out = keys.cache.attend(q, self.scale, mask, softcap=self.attn_logit_softcapping)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(b, n, -1))


_ADAPTERS: dict[type[nn.Module], type[nn.Module]] = {gemma2.Attention: Gemma2Attention}


def adapt(model: nn.Module) -> None:
    """Swap in the adapters a model needs, in place; weights stay where they are."""
    for module in model.modules():
        adapter: Callable | None = _ADAPTERS.get(type(module))
        if adapter is not None:
            module.__class__ = adapter
