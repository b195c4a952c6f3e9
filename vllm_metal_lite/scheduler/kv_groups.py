"""KV cache groups (vLLM's term): layers with the same window, which keep the same tokens.

Each group has its own block pool, and each request has one block table per group.  So a windowed
layer stores its window, not the whole context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KVGroup:
    """layers: layer indices in the store.  num_blocks: blocks per layer.

    window: most tokens a query sees, its own included; None = all.
    """

    layers: tuple[int, ...] = ()
    window: int | None = None
    num_blocks: int = 0

    def most_blocks(self, num_tokens: int, num_new_tokens: int, block_size: int) -> int:
        """Most blocks a request of num_tokens needs if a step computes num_new_tokens of them."""
        whole = -(-num_tokens // block_size)
        if self.window is None:
            return whole
        # n consecutive tokens span at most ceil((n - 1) / block_size) + 1 blocks.  The chunk's
        # first token sees window - 1 tokens before it.
        seen = self.window - 1 + num_new_tokens
        return min(whole, -(-(seen - 1) // block_size) + 1)

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that tokens from `position` on can see."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // block_size


class Layer(Protocol):
    """A layer's span: `window` tokens with the query's own, or `attention_chunk`; None = all."""

    @property
    def window(self) -> int | None: ...

    @property
    def attention_chunk(self) -> int | None: ...


def kv_groups(specs: Sequence[Layer]) -> list[KVGroup]:
    """Group a model's layers, full attention first, then windows, widest first.  num_blocks is 0.

    A chunk (Llama 4) counts as a window of the same size: it sees no farther back.  A model without
    attention layers gets one empty group, which only counts tokens.
    """
    layers: dict[int | None, list[int]] = {}
    for i, spec in enumerate(specs):
        layers.setdefault(spec.window or spec.attention_chunk, []).append(i)
    if not layers:
        return [KVGroup()]
    windows = sorted(layers, key=lambda w: -(w or 1 << 62))
    return [KVGroup(tuple(layers[w]), w) for w in windows]
