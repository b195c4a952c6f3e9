"""One layer of the store, as kernels take it.

Every function that uses the store takes a ticket and returns the next one.  Pass each function
exactly the ticket that the previous one returned (metal/kv_write.metal says why).  A ticket is a
float32 array of any shape; its values mean nothing.
"""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Output, Template
from vllm_metal_lite.kv.store import LayerSpec

# The last inputs of a kernel that uses the store.
STORE = ("keys", "values", "ticket")
TICKET: Output = (MIN_ELEMENTS,), mx.float32


class LayerStore(NamedTuple):
    """K and V of one layer, and the ticket.

    keys: (slots, num_kv_heads, k_head_dim).  values: (slots, num_kv_heads, v_head_dim).  Rows are
    words instead if `spec` has 8 or 4 bits per value.  block_size: 0 for kernels that take slots.
    """

    keys: mx.array
    values: mx.array
    ticket: mx.array
    spec: LayerSpec
    block_size: int = 0

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The inputs STORE."""
        return self[:3]

    @property
    def formats(self) -> Template:
        """Template values for the formats of the rows."""
        k_row, v_row = self.spec.k_row, self.spec.v_row
        bits = k_row.bits or 8 * k_row.dtype.size
        return {"BITS": bits, "K_GROUP": k_row.group_size, "V_GROUP": v_row.group_size}

    @property
    def template(self) -> Template:
        """Template values for the sizes and the formats of the rows."""
        return {"K_DIM": self.spec.k_head_dim, "V_DIM": self.spec.v_head_dim, **self.formats}


def new_ticket() -> mx.array:
    """The first ticket of a store, before any write."""
    return mx.zeros(*TICKET)
