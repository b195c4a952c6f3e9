"""K and V on the device, allocated once at start.

Layout, per layer: K (num_slots, num_kv_heads, k_head_dim) and V (num_slots, num_kv_heads,
v_head_dim), where slot = block_id * block_size + offset in the block.  This is vLLM's
(num_blocks, block_size, num_kv_heads, head_dim) with the first two axes merged, so one number
addresses a row.  One extra block at the end takes the writes of padding rows and is never read.

In a quantised store, rows hold 32-bit words instead of values: see row_format.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.row_format import RowFormat
from vllm_metal_lite.kv.state_store import StateStore
from vllm_metal_lite.scheduler.kv_groups import KVGroup


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The rows that one attention layer stores per token.

    dtype: the type of the values, also after dequantisation.
    window: tokens that a query sees, its own included; None = all.
    attention_chunk: a query sees only its own chunk of this many tokens; None = all.
    bits: 8 or 4 per quantised value; None = not quantised.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    window: int | None = None
    attention_chunk: int | None = None
    bits: int | None = None

    @property
    def k_row(self) -> RowFormat:
        return RowFormat(self.k_head_dim, self.dtype, self.bits)

    @property
    def v_row(self) -> RowFormat:
        return RowFormat(self.v_head_dim, self.dtype, self.bits)

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.k_row.nbytes + self.v_row.nbytes)


class PagedStore:
    """K and V of every layer; `write` stores them, attention reads `keys` and `values`.

    blocks: the KV groups, or a number: that many blocks of one group with all layers.
    shared: all groups take blocks from one pool, as in vLLM.  Layers at the same index of their
    groups then share arrays, and must have the same shape.
    num_blocks: the blocks of each group.  group_of: the group of each layer.
    states: the state store; None for a model without states.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        blocks: int | Sequence[KVGroup],
        block_size: int,
        shared: bool = False,
        states: StateStore | None = None,
    ) -> None:
        if isinstance(blocks, int):
            blocks = [KVGroup(tuple(range(len(specs))), num_blocks=blocks)]
        self.num_blocks = tuple(group.num_blocks for group in blocks)
        self.block_size = block_size
        self.specs = list(specs)
        of = {layer: g for g, group in enumerate(blocks) for layer in group.layers}
        self.group_of = [of[layer] for layer in range(len(specs))]
        place = {layer: i for group in blocks for i, layer in enumerate(group.layers)}
        self.keys, self.values = [], []
        made: dict[int, list[mx.array]] = {}  # lazy: only the arrays that are kept are allocated
        for layer, (s, g) in enumerate(zip(specs, self.group_of, strict=True)):
            shape = (self.num_blocks[g] + 1) * block_size, s.num_kv_heads
            new = [mx.zeros((*shape, row.width), row.kept_dtype) for row in (s.k_row, s.v_row)]
            k, v = made.setdefault(place[layer] if shared else layer, new)
            self.keys.append(k)
            self.values.append(v)
        self.states = StateStore() if states is None else states
        mx.eval(self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]

    @property
    def nbytes(self) -> int:
        return sum({id(a): a.nbytes for a in self.arrays}.values())

    def write(self, layer: int, k: mx.array, v: mx.array, slots: mx.array) -> None:
        """Write rows k (N, num_kv_heads, k_head_dim) and v to slots (N,).

        MLX scatters in place only while nothing else holds the array.  So read only after the last
        write of a step, and evaluate before the next step.
        """
        spec = self.specs[layer]
        rows = (self.keys[layer], k, spec.k_row), (self.values[layer], v, spec.v_row)
        for store, new, row in rows:
            if new.size:  # an indexer keeps no values; MLX's CPU scatter divides by their width
                store[slots] = row.pack(new)
