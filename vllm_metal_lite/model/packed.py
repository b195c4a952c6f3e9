"""Runs an mlx-lm model on packed steps: builds its caches and selects the rows for its head.

While the model's code runs, the hooks of seam/hooks.py hand its attention to the caches.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from vllm_metal_lite.attention.base import DeviceBatch, StepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.state_store import StateStore
from vllm_metal_lite.model.calls import unwrap_call, wrap_call
from vllm_metal_lite.model.layout import Layout, PagedLayer, StateLayer
from vllm_metal_lite.model.seam.head_embedding import HeadEmbedding
from vllm_metal_lite.model.seam.hooks import building
from vllm_metal_lite.model.seam.layer_cache import PagedLayerCache
from vllm_metal_lite.model.seam.pictures import rotating_by_axes, with_features
from vllm_metal_lite.model.seam.recurrent import RecurrentHooks
from vllm_metal_lite.model.seam.sequences import SequenceStep, call_by_batches
from vllm_metal_lite.model.seam.state_cache import StateCache


class Mode(StrEnum):
    """How the modules that use caches run, from the fastest to the most general."""

    PACKED = "packed"  # on packed rows, through the seam (seam/)
    IN_SEQUENCES = "in sequences"  # those with recurrent states see sequences (sequences.py)
    BY_SEGMENT = "by segment"  # attention too, a segment at a time (kv_segments.py)


@dataclass
class _HeadRows:
    """The rows that the body of a model hands to its head during a packed forward.

    wanted: the indices of the rows; None: all rows.  hidden: the hidden states (N, 1, hidden_size)
    of all rows, once the body has returned them.
    """

    wanted: mx.array | None
    hidden: mx.array | None = None


def body_of(model: nn.Module) -> nn.Module | None:
    """The module below `model` that owns the list of decoder layers."""
    parts = (module for module in model.modules() if module is not model)
    return next((part for part in parts if isinstance(part.get("layers"), list)), None)


class Fusion:
    """Merges several launches of a forward into one (see fusion/); this base class merges none."""

    # The cache object that the model gets for one layer of the store.
    layer_cache: type[PagedLayerCache] = PagedLayerCache

    @property
    def note(self) -> str:
        """The words about fused launches in the start-up line."""
        return ""

    def building(self, step: DeviceBatch) -> AbstractContextManager[None]:
        """Held while a forward is built."""
        return nullcontext()

    def without(self, failed_kernels: Collection[str]) -> "Fusion":
        """The same fusion, without these kernels."""
        return self


NO_FUSION = Fusion()

# A PackedModel, or a function around one: the step, its `logits_indices`, the fusion.
PackedForward = Callable[[StepAttention, mx.array | None, Fusion], tuple[mx.array, mx.array | None]]


class PackedModel:
    """An mlx-lm model that takes a packed step.

    reason: why the model does not run in a faster mode, in one line; None for Mode.PACKED.
    first_layer: the place of the model's first layer in the store.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, mode: Mode = Mode.PACKED, reason: str | None = None
    ) -> None:
        self.model, self.layout, self.mode, self.reason = model, layout, mode, reason
        users = {} if mode is Mode.PACKED else layout.state_users
        if mode is Mode.BY_SEGMENT:
            users = users | layout.kv_users
        self._wrapped = _outermost(users)
        for module in self._wrapped:
            wrap_call(module, call_by_batches)
        packs_states = bool(layout.states) and mode is Mode.PACKED
        self._recurrent_hooks = RecurrentHooks(model) if packs_states else None
        self._rows: _HeadRows | None = None  # while a packed forward is built
        self.first_layer = 0
        parts = (module for module in model.modules() if isinstance(module, HeadEmbedding))
        self._continues: HeadEmbedding | None = next(parts, None)
        # Set by a family that rotates pictures by their grid: the axis of each frequency.
        self.axis_of_frequency = np.zeros(0, np.int32)
        self.spans = ""  # set by a family whose rows of a picture see each other: KernelUse.spans
        self._body = body = body_of(model)
        if body is not None:
            wrap_call(body, self._select_rows)
            self._wrapped.append(body)

    def release(self) -> None:
        """Restore the original calls of the model.  Do not use this object afterwards."""
        for module in self._wrapped:
            unwrap_call(module)

    def _select_rows(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The wanted rows of the body's result."""
        h, rows = call(*args, **kwargs), self._rows
        if rows is None or not isinstance(h, mx.array) or h.ndim != 3:
            return h
        rows.hidden = h
        return h if rows.wanted is None else h[rows.wanted]

    @property
    def takes_hidden(self) -> bool:
        """Whether this is a trained head, which takes the model's hidden states (HeadEmbedding)."""
        return self._continues is not None

    @property
    def by_segment(self) -> str | None:
        """Why attention runs a segment at a time: MLX operations read K and V.  None if packed."""
        return self.reason if self.mode is Mode.BY_SEGMENT else None

    def state_store(self, num_slots: int) -> StateStore:
        """A store for this model's recurrent states."""
        return StateStore(self.layout.states, num_slots)

    def __call__(
        self, attention: StepAttention, logits_indices: mx.array | None, fusion: Fusion = NO_FUSION
    ) -> tuple[mx.array, mx.array | None]:
        """Build the forward of a step; returns logits (R, vocab_size) of rows `logits_indices`, and
        the hidden states (N, 1, hidden_size) of all rows below the head.

        logits_indices: None selects all rows, padding included.  Hidden states: None if they
        cannot be read.
        """
        sequences, step = None, attention.step
        if self.mode is not Mode.PACKED:
            alone = self.mode is Mode.BY_SEGMENT
            sequences = SequenceStep(attention.step, attention.store.states, alone)
        recurrence = attention.recurrence if self._recurrent_hooks else None
        hooks = self._recurrent_hooks() if self._recurrent_hooks else ()
        layers: list[PagedLayerCache] = []

        def cache(node: PagedLayer | StateLayer | None) -> Any:
            if isinstance(node, StateLayer):
                return StateCache(node.index, node.size, recurrence, sequences)
            if node is None:
                return None
            layer = self.first_layer + node.index
            layers.append(fusion.layer_cache(layer, attention, node.template, sequences))
            return layers[-1]

        caches = tree_map(cache, self.layout.nodes)
        self._rows = rows = _HeadRows(logits_indices)
        if self._continues is not None:
            self._continues.give(step.hidden)
        try:
            with ExitStack() as stack:
                if step.pictures is not None and self._body is not None:
                    hooks = [*hooks, *rotating_by_axes(step, self.axis_of_frequency)]
                    stack.enter_context(with_features(self._body, step.pictures))
                stack.enter_context(building(hooks))
                stack.enter_context(fusion.building(step))
                logits = self.model(step.token_ids[:, None], cache=caches)
        finally:
            self._rows = None
            if self._continues is not None:
                self._continues.give(None)
        for layer in layers:
            layer.end()
        if sequences is not None:
            sequences.states.commit()
        if logits_indices is not None and rows.hidden is None:
            logits = logits[logits_indices]
        return logits.squeeze(1), rows.hidden


def _outermost(modules: dict[str, nn.Module]) -> list[nn.Module]:
    """The modules (by path) that are not part of another one in `modules`."""
    return [
        module
        for path, module in modules.items()
        # The path of the model itself is "".
        if not any(path != whole and path.startswith(whole and f"{whole}.") for whole in modules)
    ]
