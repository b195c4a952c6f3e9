"""What decodes gathered, kept for the next step, which adds one token to each of them.

Copying contexts out of the store costs a CPU up to 40 % of a step, and all but one key of each were
copied the step before.  So decodes that go on unchanged keep their K and V, contiguous, and copy
what is new.  That they do is known on the host: the same blocks, one token more, and no step has
written a slot that was copied.  Any other step begins anew.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_metal_lite.attention.plan import Group
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import ForwardBatch

_SPARE = 64  # columns of room for what comes: all is copied again when they are used up

KV = tuple[mx.array, mx.array]


class KeptGroup:
    """One group of decodes.

    columns: the group with the keys it began with, padding too, and one a step behind them.
    """

    def __init__(self, group: Group) -> None:
        self.columns = group
        self._arrays: dict[int, tuple[KV, int]] = {}  # by layer, and how many columns are filled
        self._sources: dict[bool, Any] = {}  # what this step copies, on the device: all, or one

    def extend(self, batch: ForwardBatch) -> None:
        """Take in the next token of each decode."""
        old, rows = self.columns, self.columns.q_rows
        q_pos = batch.positions[rows]
        slots = np.concatenate([old.kv_slots, batch.slot_mapping[rows]], axis=1)
        kv_pos = np.concatenate([old.kv_pos, q_pos], axis=1)
        self.columns = replace(old, kv_slots=slots, kv_pos=kv_pos, q_pos=q_pos)
        self._sources = {}

    def gather(
        self, layer: int, to_device: Callable[[Group], Any], read: Callable[[int, Any], KV]
    ) -> KV:
        """K and V of all columns of a layer, (B, num_kv_heads, columns, head_dim).

        to_device, read: put a group on the device, copy its keys and values out of the store.
        """
        count = self.columns.kv_slots.shape[1]
        arrays, filled = self._arrays.get(layer, ((), 0))
        if filled < count:
            anew = filled < count - 1 or arrays[0].shape[2] < count
            if anew not in self._sources:
                self._sources[anew] = to_device(self._wanted(anew))
            rows = read(layer, self._sources[anew])
            if anew:
                arrays = rows
            else:  # in place: by the time it is computed nothing else holds the array
                for array, row in zip(arrays, rows, strict=True):
                    array[:, :, filled:count] = row
            self._arrays[layer] = arrays, count
        k, v = arrays
        return k[:, :, :count], v[:, :, :count]

    def _wanted(self, anew: bool) -> Group:
        slots = self.columns.kv_slots
        room = np.repeat(slots[:, :1], _SPARE, axis=1)
        slots = np.concatenate([slots, room], axis=1) if anew else slots[:, -1:]
        return replace(self.columns, kv_slots=slots)


class KeptDecodes:
    """The groups of the last step, if it was of decodes only.

    num_slots: of the store; the groups may hold as many keys, no more.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._groups: list[KeptGroup] = []
        self._batch: ForwardBatch | None = None
        self._held = np.zeros(num_slots + 1, bool)  # slots; the last entry is PAD_SLOT's

    def note_writes(self, slots: np.ndarray) -> None:
        """Forget what a step is about to overwrite.  slots: (N,) int32."""
        if self._groups and self._held[slots].any():
            self._groups = []

    def begin(self, batch: ForwardBatch, groups: list[Group]) -> None:
        """Remember a step's groups, each of which sees its whole context."""
        self._groups, self._batch = [], batch
        num_keys = sum(g.kv_slots.size + len(g.kv_slots) * _SPARE for g in groups)
        if batch.num_decodes == batch.num_segments and num_keys <= self.num_slots:
            self._groups = [KeptGroup(g) for g in groups]
            self._held[:] = False
            for g in groups:
                self._held[g.kv_slots] = True

    def go_on(self, batch: ForwardBatch) -> list[KeptGroup]:
        """The groups of a step, if it is the last one's decodes, a token longer; none if not."""
        if not self._groups or not self._continues(batch):
            return []
        for group in self._groups:
            group.extend(batch)
        self._held[batch.slot_mapping] = True
        self._batch = batch
        return self._groups

    def _continues(self, batch: ForwardBatch) -> bool:
        last, width = self._batch, self._batch.block_tables.shape[1]
        if batch.num_decodes != batch.num_segments or len(batch.seq_lens) != len(last.seq_lens):
            return False
        if (batch.seq_lens != last.seq_lens + 1).any() or batch.slot_mapping.min() < 0:
            return False
        used = np.arange(width) * batch.block_size < last.seq_lens[:, None]
        return bool(((batch.block_tables[:, :width] == last.block_tables) | ~used).all())
