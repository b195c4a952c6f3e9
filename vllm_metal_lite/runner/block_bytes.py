"""The bytes of blocks and of recurrent states, read and written by the host.

The store lies in memory that host and device share, and a block of a layer is contiguous.  So both
directions are plain copies, without kernels.  No step may be in flight: the device would not wait.
"""

from collections.abc import Iterator

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.store import PagedStore


class BlockBytes:
    """Copies bytes from and to a store.

    A place is a block of a KV group or, in the "group" behind the last one, a slot of the states.
    """

    def __init__(self, store: PagedStore) -> None:
        # The arrays of each group, and their rows a place.  The order of the layers is part of
        # what the bytes mean.
        self._groups: list[tuple[list[mx.array], int]] = []
        for group in range(len(store.num_blocks)):
            layers = [layer for layer, of in enumerate(store.group_of) if of == group]
            arrays = [a for layer in layers for a in (store.keys[layer], store.values[layer])]
            self._groups.append((arrays, store.block_size))
        self._groups.append((store.states.arrays, 1))

    def size(self, group: int) -> int:
        """Bytes of one place of a group."""
        arrays, rows = self._groups[group]
        return sum(a.nbytes // len(a) * rows for a in arrays)

    def read(self, group: int, place: int) -> bytes:
        return b"".join(rows.tobytes() for rows in self._rows(group, place))

    def write(self, group: int, place: int, data: memoryview) -> None:
        at = 0
        for rows in self._rows(group, place):
            rows[:] = np.frombuffer(data[at : at + len(rows)], np.uint8)
            at += len(rows)

    def _rows(self, group: int, place: int) -> Iterator[np.ndarray]:
        """The bytes of a place in each array, not copied."""
        arrays, count = self._groups[group]
        for array in arrays:
            if array.size:  # an indexer keeps no values
                flat = array.reshape(len(array), -1).view(mx.uint8)
                mx.eval(flat)
                rows = np.array(flat, copy=False)[place * count : (place + 1) * count]
                yield rows.reshape(-1)
