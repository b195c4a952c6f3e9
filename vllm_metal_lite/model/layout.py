"""Finds the caches of a model, and the modules that use them.

The model runs some tokens as mlx-lm runs it.  Then its caches show their shapes.  Meanwhile each
read of a cache is noted for the innermost module that runs:

    body(x, caches)                          reads caches[0].offset: a user of this cache
        layer(x, mask, caches[0])            passes the cache on: no user
            attention(x, mask, caches[0])    calls update_and_fetch: a user

A model that cannot run on packed rows alone (`Mode` in packed.py) calls the users with sequences.
Nothing is evaluated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
from vllm_metal_lite.model.seam.hooks import Hook, hooked
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
# By the id of a cache: the modules that use it, by path.
Uses = dict[int, dict[str, nn.Module]]


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

    def add(self, cache: Any, empty: Any, uses: Uses) -> Node:
        """The node for a cache that the model has used.  empty: the same cache, unused."""
        if isinstance(cache, CacheList):
            pairs = zip(cache.caches, empty.caches, strict=True)
            return tuple(self.add(*pair, uses) for pair in pairs)
        users = uses[id(cache)]
        if isinstance(cache, ArraysCache):
            self.state_users |= users
            layer = self.num_recurrent_layers
            states: list[mx.array | None] = list(cache.cache)  # mlx-lm's annotation says list[None]
            self.states += [
                StateSpec((layer, index), a.shape[1:], a.dtype)
                for index, a in enumerate(states)
                if a is not None
            ]
            self.num_recurrent_layers += 1
            return StateLayer(layer, len(cache.cache))
        self.kv_users |= users
        if cache.keys is None:
            # With an offset: a layer of another stage.  The model asks its cache for masks and
            # positions, which are those of the first layer.  Else the layer keeps nothing.
            return PagedLayer(0, empty) if cache.offset else None
        _, heads, _, k_dim = cache.keys.shape
        dims = heads, k_dim, cache.values.shape[-1]
        for user in users.values():  # an adapted one may store other shapes (adapters.py)
            dims = getattr(user, "kept_dims", dims)
        window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        chunk = cache.chunk_size if isinstance(cache, ChunkedKVCache) else None
        self.specs.append(LayerSpec(*dims, cache.keys.dtype, window, chunk))
        return PagedLayer(len(self.specs) - 1, empty)


# mlx-lm's caches that the engine can replace.
_KNOWN = ArraysCache, *NATIVE_TYPES
# Tokens after which states have their final shapes.
_SETTLED = 8


def find_layout(model: nn.Module, model_type: str) -> Layout:
    """Run some tokens natively to find the caches and their users; raises ModelLoadError."""
    caches, empty = make_prompt_cache(model), make_prompt_cache(model)
    members = list(_members(caches))
    for cache in members:
        if type(cache) not in _KNOWN or getattr(cache, "keep", False):
            raise ModelLoadError(
                f"the architecture {model_type} is not supported: it has its own class of cache "
                f"({type(cache).__name__})"
            )
    try:
        with noting_silu(model), _noting_uses(model, members) as uses:
            logits = model(mx.zeros((1, 1), mx.int32), cache=caches)
            if any(isinstance(cache, ArraysCache) for cache in members):
                # A state may grow during the first tokens: an n-gram's context does.
                model(mx.zeros((1, _SETTLED), mx.int32), cache=caches)
    except Exception as e:
        raise ModelLoadError(f"mlx-lm cannot run this {model_type} model: {one_line(e)}") from e
    layout = Layout(logits.shape[-1], logits.dtype)
    layout.nodes = [layout.add(*pair, uses) for pair in zip(caches, empty, strict=True)]
    return layout


def _members(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, with the members of each CacheList in its place."""
    for cache in caches:
        yield from _members(cache.caches) if type(cache) is CacheList else (cache,)


@contextmanager
def _noting_uses(model: nn.Module, caches: Sequence[Any]) -> Iterator[Uses]:
    """While held, each read of a cache is noted for the innermost module that runs."""
    paths = {id(module): path for path, module in model.named_modules()}
    uses: Uses = {id(cache): {} for cache in caches}
    running: list[nn.Module | None] = [None]  # the innermost last

    def run(module: nn.Module | None, call: Callable, *args: Any, **kwargs: Any) -> Any:
        running.append(module)
        y = call(*args, **kwargs)
        running.pop()
        return y

    def read(original: Callable, cache: Any, name: str) -> Any:
        module, is_use = running[-1], name != "make_mask" and not name.startswith("__")
        if is_use and module is not None and id(cache) in uses:
            uses[id(cache)][paths[id(module)]] = module
        return original(cache, name)

    hooks: list[Hook] = [(kind, "__getattribute__", read) for kind in _KNOWN]
    # A module that asks a cache for a mask does not use K and V.
    hooks += [(k, "make_mask", partial(run, None)) for k in _KNOWN if hasattr(k, "make_mask")]
    with observing(model.modules(), run), hooked(hooks):
        yield uses
