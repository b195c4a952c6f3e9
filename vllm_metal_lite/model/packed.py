"""An mlx-lm model that takes packed steps: its caches for a step, and which rows reach its head."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.nn as nn
from mlx_lm.models import activations

from vllm_metal_lite.attention.base import Attention, StepMetadata
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.hooks import Transposed, hooks
from vllm_metal_lite.fusion.joined import Product
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.model.layout import Layout, Node, StateLayer, is_part, outermost
from vllm_metal_lite.model.seam.layer_cache import PagedLayerCache
from vllm_metal_lite.model.sequences.recurrent import StateCache
from vllm_metal_lite.model.sequences.runs import CacheMembers, SequenceStep, show_sequences


class _Rows:
    """The rows that the body of a model hands to its head during a packed forward."""

    wanted: mx.array | None = None
    taken = False


def _select_rows(body: nn.Module, rows: _Rows) -> None:
    """Make `body`, which owns the decoder layers, hand only the wanted rows to the head."""
    base = type(body)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        h = base.__call__(self, *args, **kwargs)
        if rows.wanted is not None and isinstance(h, mx.array) and h.ndim == 3:
            rows.taken = True
            h = h[rows.wanted]
        return h

    body.__class__ = type(base.__name__, (base,), {"__call__": call})


def _body(model: nn.Module) -> nn.Module | None:
    """The module below `model` that owns the list of decoder layers."""
    for _, module in model.named_modules():
        if module is not model and isinstance(module.get("layers"), list):
            return module
    return None


def _activations(model: nn.Module) -> list[ModuleType]:
    """The modules that define some part of a model and know mlx-lm's `swiglu` by that name."""
    parts = {type(module) for _, module in model.named_modules()}
    names = {base.__module__ for part in parts for base in part.__mro__}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [m for m in modules if getattr(m, "swiglu", None) is activations.swiglu]


class PackedModel:
    """An mlx-lm model that takes a packed step.

    by_segment: why attention modules see sequences too, a segment at a time (sequences.py), in one
    line; None if they do not have to.
    products: the model's joined projections.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        by_segment: str | None = None,
        products: Sequence[Product] = (),
    ) -> None:
        self.model, self.layout, self.products = model, layout, products
        users = outermost({**layout.state_users, **(layout.kv_users if by_segment else {})})
        for module in users.values():
            show_sequences(module)
        # Where one of them uses K and V it can only see a segment at a time.
        self.by_segment: str | None = None
        if any(is_part(kv, path) for path in users for kv in layout.kv_users):
            self.by_segment = by_segment or "modules that keep K and V keep a state too"
        self._transposed: Transposed = {}
        self._activations = _activations(model)
        self._rows = _Rows()
        body = _body(model)
        if body is not None:
            _select_rows(body, self._rows)

    @property
    def sees_sequences(self) -> bool:
        """Whether some modules are called a run of segments at a time."""
        return bool(self.layout.num_states) or self.reads_store

    @property
    def reads_store(self) -> bool:
        """Whether attention is a segment at a time: K and V are read by MLX operations."""
        return self.by_segment is not None

    @property
    def no_prefix_cache(self) -> str | None:
        """Why blocks of a shared prefix cannot be shared, or None if they can."""
        if self.layout.num_states:
            return "its recurrent layers keep one state a request, not one a block"
        if self.reads_store:
            return "its attention reads the store before all of a step is written"
        return None

    @property
    def attention_specs(self) -> list[LayerSpec]:
        """The layers that keep K and V, in order: the store's layers."""
        return self.layout.specs

    @property
    def linear_weights(self) -> list[mx.array]:
        """Of its linear layers that are neither quantised nor biased, (outputs, inputs) each."""
        modules = (m for _, m in self.model.named_modules() if type(m) is nn.Linear)
        return [m["weight"] for m in modules if "bias" not in m]

    def __call__(
        self, step: StepMetadata, attention: Attention, logits_indices: mx.array | None
    ) -> mx.array:
        """Build the forward of a step; returns logits (R, vocab_size) of the rows asked for.

        None asks for all of them, padding included.
        """
        sequences = None
        if self.sees_sequences:
            sequences = SequenceStep(step, attention.store.states, self.reads_store)
        layers: list[PagedLayerCache] = []
        caches = [self._cache(n, attention, step, sequences, layers) for n in self.layout.nodes]
        self._rows.wanted, self._rows.taken = logits_indices, False
        try:
            with hooks(attention, step, self._transposed, self._activations):
                logits = self.model(step.token_ids[:, None], cache=caches)
        finally:
            self._rows.wanted = None
            for product in self.products:
                product.forget()
        for layer in layers:
            layer.settle()
        if sequences is not None:
            sequences.states.commit()
        if logits_indices is not None and not self._rows.taken:
            logits = logits[logits_indices]
        return logits.squeeze(1)

    def _cache(
        self,
        node: Node,
        attention: Attention,
        step: StepMetadata,
        sequences: SequenceStep | None,
        layers: list[PagedLayerCache],
    ) -> Any:
        """What the model sees as one of its list of caches; those of the store go to `layers`."""
        if isinstance(node, tuple):
            return CacheMembers(self._cache(n, attention, step, sequences, layers) for n in node)
        if isinstance(node, StateLayer):
            return StateCache(node.index, node.size, sequences)
        if node is None:
            return None
        spec = self.layout.specs[node.index]
        cache = PagedLayerCache(node.index, spec, attention, step, node.template, sequences)
        layers.append(cache)
        return cache
