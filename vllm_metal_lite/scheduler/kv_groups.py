"""KV cache groups (vLLM's word): layers that see equally far back, and so keep the same tokens.

A group has a pool of blocks of its own, and each request a block table a group.  So a layer with a
window costs its window and not the context, and layers of unlike shape never share a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KVGroup:
    """layers: their numbers in the store.  num_blocks: of each of them.

    window: how many tokens, its own included, a query sees at most; None = all.
    """

    layers: tuple[int, ...] = ()
    window: int | None = None
    num_blocks: int = 0

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """The most blocks that a request of num_tokens has use for while `chunk` are computed."""
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        # A row of n tokens lies in at most ceil((n - 1) / block_size) + 1 blocks; the chunk's first
        # token sees window - 1 tokens before it.
        seen = self.window - 1 + chunk
        return min(whole, -(-(seen - 1) // block_size) + 1)

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that rows from `position` on have use for."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // block_size


class Layer(Protocol):
    """How far back a layer sees: `window` tokens, its own included, or its `chunk`; None = all."""

    @property
    def window(self) -> int | None: ...

    @property
    def chunk(self) -> int | None: ...


def kv_groups(specs: Sequence[Layer]) -> list[KVGroup]:
    """The groups of a model's layers, still without blocks: all of the context first, then the
    wider windows before the narrower ones.  A model without such layers has one, which counts.

    A chunk (Llama 4) is treated as a window of its size: it sees no farther back.
    """
    layers: dict[int | None, list[int]] = {}
    for i, spec in enumerate(specs):
        layers.setdefault(spec.window or spec.chunk, []).append(i)
    if not layers:
        return [KVGroup()]
    windows = sorted(layers, key=lambda w: -(w or 1 << 62))
    return [KVGroup(tuple(layers[w]), w) for w in windows]
