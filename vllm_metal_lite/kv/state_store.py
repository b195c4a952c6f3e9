"""States of recurrent layers, by slot.

A request holds a slot: one row of each array.  A step reads the slots that its segments start from,
and writes the slots that take their states at the end and at checkpoints (`ForwardBatch`).  So a
batch that changes copies nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_metal_lite.backend import mx

Key = tuple[int, int]  # (recurrent layer, index of the state in the layer)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of one recurrent layer: its shape and dtype for one request."""

    key: Key
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


class StateStore:
    """arrays: (num_slots, *shape) of each state.

    Kernels write the arrays in place.  `write` replaces an array, in place if nothing else reads
    it.
    """

    def __init__(self, specs: Sequence[StateSpec] = (), num_slots: int = 0) -> None:
        self.num_slots = num_slots if specs else 0
        self._arrays = {s.key: mx.zeros((num_slots, *s.shape), s.dtype) for s in specs}
        mx.eval(self.arrays)

    def __getitem__(self, key: Key) -> mx.array:
        return self._arrays[key]

    @property
    def arrays(self) -> list[mx.array]:
        return list(self._arrays.values())

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def write(self, key: Key, slots: mx.array, states: mx.array) -> None:
        """Set the states (B, *shape) of slots (B,).

        Everything read from the store in this step must be an input of `states`: MLX copies the
        whole array if something may still read it.
        """
        self._arrays[key][slots] = states
