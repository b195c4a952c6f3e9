"""Runs an mlx-lm model on packed steps: builds its caches and selects the rows for its head."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.attention.base import Step, StepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.state_store import StateStore
from vllm_metal_lite.model.calls import wrap_call
from vllm_metal_lite.model.layout import Layout, Node, PagedLayer, StateLayer, is_part, outermost
from vllm_metal_lite.model.seam.hooks import building
from vllm_metal_lite.model.seam.layer_cache import PagedLayerCache
from vllm_metal_lite.model.seam.recurrent import RecurrentHooks
from vllm_metal_lite.model.seam.state_cache import StateCache
from vllm_metal_lite.model.sequences.step import SequenceStep, call_by_batches


class _HeadRows:
    """The rows that the body of a model hands to its head during a packed forward."""

    wanted: mx.array | None = None
    taken = False
    is_packed = False  # while a packed forward is built
    hidden: mx.array | None = None  # all rows of a packed forward, (N, 1, hidden_size)

    def select(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The wanted rows of what the body's call returns."""
        h = call(*args, **kwargs)
        if self.is_packed and isinstance(h, mx.array) and h.ndim == 3:
            self.hidden = h
            if self.wanted is not None:
                self.taken = True
                h = h[self.wanted]
        return h


def body_of(model: nn.Module) -> nn.Module | None:
    """The module below `model` that owns the list of decoder layers."""
    for _, module in model.named_modules():
        if module is not model and isinstance(module.get("layers"), list):
            return module
    return None


class Fusion:
    """Merges several launches of a forward into one (see fusion/); this base class merges none."""

    # The cache object that the model gets for one layer of the store.
    layer_cache: type[PagedLayerCache] = PagedLayerCache

    @property
    def note(self) -> str:
        """The part of the start-up line about products."""
        return ""

    def building(self, step: Step) -> AbstractContextManager[None]:
        """Held while a forward is built."""
        return nullcontext()

    def without(self, failed_kernels: Collection[str]) -> "Fusion":
        """The same without these kernels."""
        return self


NO_FUSION = Fusion()


def _map_leaves(cache: Callable[[Any], Any], node: Node) -> Any:
    """An entry of the model's list of caches.

    Not a closure in the forward: a recursive closure is a reference cycle, which would keep the
    step's arrays until Python's garbage collector runs.
    """
    if isinstance(node, tuple):
        return tuple(_map_leaves(cache, member) for member in node)
    return None if node is None else cache(node)


class PackedModel:
    """An mlx-lm model that takes a packed step.

    by_segment: why attention runs one segment at a time (sequences/step.py), in one line; None
    if attention runs packed.  in_sequences: why modules with recurrent states see sequences; None
    if there are none, or if they work on packed rows (seam/recurrent.py).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        by_segment: str | None = None,
        in_sequences: str | None = None,
    ) -> None:
        self.model, self.layout = model, layout
        if by_segment and layout.states:
            in_sequences = by_segment
        self.in_sequences = in_sequences if layout.states else None
        users = outermost(
            {
                **(layout.state_users if in_sequences else {}),
                **(layout.kv_users if by_segment else {}),
            }
        )
        for module in users.values():
            wrap_call(module, call_by_batches)
        # A module that uses K and V can see only one segment at a time.
        self.by_segment: str | None = None
        if any(is_part(kv, path) for path in users for kv in layout.kv_users):
            self.by_segment = by_segment or "modules that keep K and V keep a state too"
        # Called for each forward; `tuple` makes no hooks.
        self._hooks = RecurrentHooks(model) if layout.states and not in_sequences else tuple
        self._rows = _HeadRows()
        body = body_of(model)
        self.shows_hidden = body is not None  # whether a forward gives hidden states
        if body is not None:
            wrap_call(body, self._rows.select)

    @property
    def sees_sequences(self) -> bool:
        """Whether some modules run on sequences (sequences/step.py), not on packed rows."""
        return self.in_sequences is not None or self.reads_store

    @property
    def reads_store(self) -> bool:
        """Whether attention runs one segment at a time: MLX operations read K and V."""
        return self.by_segment is not None

    @property
    def no_prefix_cache(self) -> str | None:
        """Why the prefix cache is off, or None if it is on."""
        if self.layout.states and self.reads_store:
            return "its attention runs a segment at a time, and its recurrent layers keep states"
        return None

    def state_store(self, num_slots: int) -> StateStore:
        """A store for this model's recurrent states."""
        return StateStore(self.layout.states, num_slots)

    def __call__(
        self, attention: StepAttention, logits_indices: mx.array | None, fusion: Fusion = NO_FUSION
    ) -> tuple[mx.array, mx.array | None]:
        """Build the forward of a step; returns logits (R, vocab_size) of rows `logits_indices`, and
        the hidden states (N, 1, hidden_size) of all rows below the head.

        logits_indices: None selects all rows, padding included.  Hidden states: None if the model
        hides them.
        """
        step, sequences, recurrence = attention.step, None, None
        if self.sees_sequences:
            sequences = SequenceStep(step, attention.store.states, self.reads_store)
        if self.layout.states and self.in_sequences is None:
            recurrence = attention.recurrence
        layers: list[PagedLayerCache] = []

        def cache(node: PagedLayer | StateLayer) -> Any:
            if isinstance(node, StateLayer):
                return StateCache(node.index, node.size, recurrence, sequences)
            spec = self.layout.specs[node.index]
            layer = fusion.layer_cache(node.index, spec, attention, node.template, sequences)
            layers.append(layer)
            return layer

        caches = [_map_leaves(cache, node) for node in self.layout.nodes]
        self._rows.wanted, self._rows.taken, self._rows.is_packed = logits_indices, False, True
        try:
            with building(self._hooks()), fusion.building(step):
                logits = self.model(step.token_ids[:, None], cache=caches)
        finally:
            hidden, self._rows.hidden = self._rows.hidden, None
            self._rows.wanted, self._rows.is_packed = None, False
        for layer in layers:
            layer.end()
        if sequences is not None:
            sequences.states.commit()
        if logits_indices is not None and not self._rows.taken:
            logits = logits[logits_indices]
        return logits.squeeze(1), hidden
