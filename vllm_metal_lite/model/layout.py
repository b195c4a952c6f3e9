"""The caches of a model, and the modules that use them."""

from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, RotatingKVCache

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.state_store import StateSpec
from vllm_metal_lite.kv.store import LayerSpec


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """A layer of the store; template: mlx-lm's own empty cache for it."""

    index: int
    template: Any


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A recurrent layer, with `size` arrays of state."""

    index: int
    size: int


# One entry of a model's list of caches: a layer, several layers (a CacheList), or no cache.
Node = PagedLayer | StateLayer | tuple | None


@dataclass
class Layout:
    """nodes: one per cache in the model's list.  specs: the store's layers, in order.

    states: the states of all recurrent layers.  kv_users, state_users: the modules that use K and
    V, or states, by path.
    """

    vocab_size: int
    logits_dtype: mx.Dtype
    nodes: list[Node] = field(default_factory=list)
    specs: list[LayerSpec] = field(default_factory=list)
    states: list[StateSpec] = field(default_factory=list)
    kv_users: dict[str, nn.Module] = field(default_factory=dict)
    state_users: dict[str, nn.Module] = field(default_factory=dict)
    num_recurrent_layers: int = 0

    @property
    def dtype(self) -> mx.Dtype:
        """The type of the rows."""
        return self.specs[0].dtype if self.specs else self.logits_dtype

    def add(self, cache: Any) -> Node:
        """The node for a cache that holds some tokens."""
        if isinstance(cache, CacheList):
            return tuple(self.add(c) for c in cache.caches)
        if isinstance(cache, ArraysCache):
            layer = self.num_recurrent_layers
            states: list[mx.array | None] = list(cache.cache)  # mlx-lm's annotation says list[None]
            self.states += [
                StateSpec((layer, index), a.shape[1:], a.dtype)
                for index, a in enumerate(states)
                if a is not None
            ]
            self.num_recurrent_layers += 1
            return StateLayer(layer, len(cache.cache))
        if cache.keys is None:
            # With an offset: a layer of another stage.  The model asks its cache for masks and
            # positions, which are those of the first layer.  Else the layer keeps nothing.
            return PagedLayer(0, cache.template) if cache.offset else None
        _, heads, _, k_dim = cache.keys.shape
        v_dim = cache.values.shape[-1]
        # An adapted module (adapters/) may store other shapes than mlx-lm's module.
        heads, k_dim, v_dim = getattr(cache.user, "kept_dims", (heads, k_dim, v_dim))
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        chunk = cache.chunk_size if isinstance(cache, ChunkedKVCache) else None
        self.specs.append(LayerSpec(heads, k_dim, v_dim, cache.keys.dtype, window, chunk))
        return PagedLayer(len(self.specs) - 1, cache.template)
