"""A tiny model with all launches that can be fused, through the steps of a trial."""

from dataclasses import replace
from typing import Any

from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.fusion.launches import FusedLaunches, fuse
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.trial import BLOCK, Draw, Row


class Fused:
    """Fuses a model in place.  draw: holds the logits from before."""

    def __init__(self, loaded: LoadedModel, *, joins: bool = True) -> None:
        self.packed, self.shapes = loaded.packed, loaded.attention_shapes
        self.layout = loaded.packed.layout
        self.draw = Draw(self.packed.model, self.layout.vocab_size)
        self.fusion: FusedLaunches = fuse(self.packed.model, joins=joins)

    def rows(self, **changes: Any) -> list[Row]:
        """The rows of the trial by kernels.  changes: of the fusion."""
        store = PagedStore(self.layout.specs, 4, BLOCK, states=self.packed.state_store(2))
        attention = KernelAttention(store, "gather", self.shapes)
        return self.draw.rows(self.packed, attention, replace(self.fusion, **changes))
