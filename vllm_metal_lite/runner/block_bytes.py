"""The bytes of blocks and of recurrent states, read and written by the host.

The store lies in memory that host and device share, and a block of a layer is contiguous.  So both
directions are plain copies, without kernels.  No step may be in flight: the device would not wait.
"""

from collections.abc import Iterator

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.store import PagedStore


class BlockBytes:
    """Copies bytes from and to a store.  Blocks are (KV group, block id); slots are of states."""

    def __init__(self, store: PagedStore) -> None:
        self._store = store
        # The order of layers is part of what the bytes mean.
        self._layers = [
            [layer for layer, of in enumerate(store.group_of) if of == group]
            for group in range(len(store.num_blocks))
        ]

    def block_size(self, group: int) -> int:
        """Bytes of one block of a group."""
        slots = self._store.block_size
        return sum(a.nbytes // len(a) * slots for a in self._arrays_of(group))

    @property
    def state_size(self) -> int:
        """Bytes of one slot of recurrent states."""
        return sum(a.nbytes // len(a) for a in self._store.states.arrays)

    def _arrays_of(self, group: int) -> list[mx.array]:
        store = self._store
        return [
            a for layer in self._layers[group] for a in (store.keys[layer], store.values[layer])
        ]

    def read_block(self, group: int, block: int) -> bytearray:
        size = self._store.block_size
        return _read(self._arrays_of(group), block * size, size)

    def write_block(self, group: int, block: int, data: memoryview) -> None:
        size = self._store.block_size
        _write(self._arrays_of(group), block * size, size, data)

    def read_state(self, slot: int) -> bytearray:
        return _read(self._store.states.arrays, slot, 1)

    def write_state(self, slot: int, data: memoryview) -> None:
        _write(self._store.states.arrays, slot, 1, data)


def _rows(arrays: list[mx.array], start: int, count: int) -> Iterator[np.ndarray]:
    """The bytes of rows [start, start + count) of each array, in place."""
    for array in arrays:
        if array.size:  # an indexer keeps no values
            flat = array.reshape(len(array), -1).view(mx.uint8)
            mx.eval(flat)
            yield np.array(flat, copy=False)[start : start + count].reshape(-1)


def _read(arrays: list[mx.array], start: int, count: int) -> bytearray:
    return bytearray().join(_rows(arrays, start, count))


def _write(arrays: list[mx.array], start: int, count: int, data: memoryview) -> None:
    at = 0
    for rows in _rows(arrays, start, count):
        rows[:] = np.frombuffer(data[at : at + len(rows)], np.uint8)
        at += len(rows)
