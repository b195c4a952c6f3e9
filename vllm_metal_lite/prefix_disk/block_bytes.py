"""The bytes of blocks and of recurrent states, read and written by the host.

The store lies in memory that host and device share, and a block of a layer is contiguous.  So both
directions are plain copies, without kernels.  No step may be in flight: the device would not wait.
"""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.store import PagedStore


class BlockBytes:
    """Copies bytes from and to a store.  Views of the store stay open until `close`.

    sizes: the number of bytes of a place, by group.  parts.py explains places and groups.
    """

    def __init__(self, store: PagedStore) -> None:
        # The arrays of each group, and the number of rows of a place.  A file holds the layers in
        # this order.
        self._groups: list[tuple[list[mx.array], int]] = []
        for group in range(len(store.num_blocks)):
            layers = [layer for layer, of in enumerate(store.group_of) if of == group]
            arrays = [a for layer in layers for a in (store.keys[layer], store.values[layer])]
            self._groups.append((arrays, store.block_size))
        self._groups.append((store.states.arrays, 1))
        self.sizes = [
            sum(a.nbytes // len(a) * rows for a in arrays) for arrays, rows in self._groups
        ]
        self._open: dict[int, list[np.ndarray]] = {}

    def read(self, group: int, place: int) -> memoryview:
        """A copy of the bytes of a place."""
        rows = [array[place] for array in self._bytes_of(group)]
        return np.concatenate(rows).data

    def write(self, group: int, place: int, data: memoryview) -> None:
        at, new = 0, np.frombuffer(data, np.uint8)
        for array in self._bytes_of(group):
            array[place] = new[at : at + array.shape[1]]
            at += array.shape[1]

    def close(self) -> None:
        """Let go of the store, because MLX does not write to arrays that others hold."""
        self._open.clear()

    def _bytes_of(self, group: int) -> list[np.ndarray]:
        """The memory of each array: (places, bytes)."""
        if group not in self._open:
            arrays, rows = self._groups[group]
            kept = [a for a in arrays if a.size]  # an indexer keeps no values
            flat = [a.reshape(len(a) // rows, -1).view(mx.uint8) for a in kept]
            mx.eval(flat)
            self._open[group] = [np.array(a, copy=False) for a in flat]
        return self._open[group]
