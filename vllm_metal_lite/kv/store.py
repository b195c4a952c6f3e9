"""Where K and V live on the device: allocated once, at start; nothing of it grows while serving.

Layout, per layer: K (num_slots, num_kv_heads, k_head_dim) and V (num_slots, num_kv_heads,
v_head_dim), where slot = block_id * block_size + offset in the block.  This is vLLM's
(num_blocks, block_size, num_kv_heads, head_dim) with the first two axes as one, so that a row is
addressed by one number.  One more block lies behind the last: rows of padding are written there,
and nobody reads it.

A quantised store has rows of 32-bit words instead of values: see quantised.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.quantised import RowFormat
from vllm_metal_lite.kv.state import SeatStates


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps for a token.

    dtype: of the values, and of what is read back where they are kept in fewer bits.
    window: how many tokens, its own included, a query sees; None = all.
    chunk: a query sees its own chunk of so many tokens; None = all.
    bits: of a quantised value, 8 or 4; None = values are kept as they are.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    window: int | None = None
    chunk: int | None = None
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
    """K and V of every layer; written by `write`, read by attention through `keys` / `values`.

    states: what recurrent layers keep, by seat and not by block; see state.py.
    """

    def __init__(self, specs: Sequence[LayerSpec], num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.specs = list(specs)
        slots = (num_blocks + 1) * block_size

        def rows(spec: LayerSpec, row: RowFormat) -> mx.array:
            return mx.zeros((slots, spec.num_kv_heads, row.width), row.kept_dtype)

        self.keys = [rows(s, s.k_row) for s in specs]
        self.values = [rows(s, s.v_row) for s in specs]
        self.states = SeatStates()
        mx.eval(self.arrays)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]

    @property
    def padding_slot(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def write(self, layer: int, k: mx.array, v: mx.array, slots: mx.array) -> None:
        """Write rows k (N, num_kv_heads, k_head_dim), v likewise, at slots (N,).

        A scatter, in place: MLX gives it the store's own memory as long as nothing else holds the
        array, so read only after the last write of a step, and evaluate before the next step.
        """
        spec = self.specs[layer]
        rows = (self.keys[layer], k, spec.k_row), (self.values[layer], v, spec.v_row)
        for store, new, row in rows:
            if new.size:  # an indexer keeps no values; MLX's CPU scatter divides by their width
                store[slots] = row.pack(new)
