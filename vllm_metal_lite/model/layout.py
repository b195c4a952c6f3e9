"""The caches of a model, and the modules that use them, found over some native tokens.

The model runs as mlx-lm runs it.  Calls of modules are noted while they run, and a cache that is
used notes the innermost of them.  Nothing is evaluated.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError, one_line
from vllm_metal_lite.kv.state_store import StateSpec
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.model.calls import observing
from vllm_metal_lite.model.seam.kv_segments import NATIVE_TYPES
from vllm_metal_lite.model.seam.recurrent import noting_silu


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """A layer of the store.  template: mlx-lm's own empty cache for the layer."""

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
    """The caches of a model, and who uses them.

    nodes: one per cache in the model's list.  specs: the store's layers, in order.
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
        # An adapted module (adapters.py) may store other shapes than mlx-lm's module.
        heads, k_dim, v_dim = getattr(cache.user, "kept_dims", (heads, k_dim, v_dim))
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        chunk = cache.chunk_size if isinstance(cache, ChunkedKVCache) else None
        self.specs.append(LayerSpec(heads, k_dim, v_dim, cache.keys.dtype, window, chunk))
        return PagedLayer(len(self.specs) - 1, cache.template)


# Tokens after which states have their final shapes.
_SETTLED = 8


def find_layout(model: nn.Module, model_type: str) -> Layout:
    """Run some tokens natively to find the caches and their users; raises ModelLoadError."""
    users: dict[int, set[str]] = {}  # by the module's id: "kv", "state" or both
    running: list[nn.Module | None] = []  # the modules that are being called, the innermost last
    caches = [_watched(c, running, users, model_type) for c in make_prompt_cache(model)]

    def noting(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running.append(module)
        y = call(*args, **kwargs)
        running.pop()
        return y

    try:
        with noting_silu(model), observing(model.modules(), noting):
            logits = model(mx.zeros((1, 1), mx.int32), cache=caches)
            if any("state" in kinds for kinds in users.values()):
                # A state may grow during the first tokens: an n-gram's context does.
                model(mx.zeros((1, _SETTLED), mx.int32), cache=caches)
    except Exception as e:
        raise ModelLoadError(f"mlx-lm cannot run this {model_type} model: {one_line(e)}") from e
    layout = Layout(logits.shape[-1], logits.dtype)
    layout.nodes = [layout.add(c) for c in caches]
    for path, module in model.named_modules():
        for kind, found in (("kv", layout.kv_users), ("state", layout.state_users)):
            if kind in users.get(id(module), ()):
                found[path] = module
    return layout


def _watched(
    cache: Any, running: list[nn.Module | None], users: dict[int, set[str]], model_type: str
) -> Any:
    """A copy of the cache that notes which modules use it."""
    if type(cache) is CacheList:
        return CacheList(*(_watched(c, running, users, model_type) for c in cache.caches))
    if type(cache) not in (ArraysCache, *NATIVE_TYPES) or getattr(cache, "keep", False):
        raise ModelLoadError(
            f"the architecture {model_type} is not supported: it has its own class of cache "
            f"({type(cache).__name__})"
        )
    base: Any = type(cache)
    kind = "state" if base is ArraysCache else "kv"

    def read(self: Any, name: str) -> Any:
        user = running[-1] if running else None
        if user is not None and name != "make_mask" and not name.startswith("__"):
            users.setdefault(id(user), set()).add(kind)
            vars(watched)["user"] = user
        return base.__getattribute__(self, name)

    def make_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
        running.append(None)  # reading the cache for a mask is not a use of K and V
        mask = base.make_mask(self, *args, **kwargs)
        running.pop()
        return mask

    watched = copy.copy(cache)
    watched.template, watched.user = cache, None
    methods = {"make_mask": make_mask, "__getattribute__": read}
    watched.__class__ = type(base.__name__, (base,), methods)
    return watched
