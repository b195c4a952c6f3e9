"""The cache of a recurrent layer during a packed forward.

Mamba, RWKV, gated delta nets, short convolutions, linear attention: mlx-lm keeps their states in an
`ArraysCache` of a few arrays (B, ...).  Modules that work on packed rows get handles for the arrays
(recurrent.py).  Modules that see sequences get the arrays, a batch at a time (sequences.py).
"""

from typing import Any

from mlx_lm.models.cache import ArraysCache

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.state_store import Key
from vllm_metal_lite.model.seam.layer_cache import POISON_SHAPE
from vllm_metal_lite.model.seam.sequences import PackedCache, SequenceStep
from vllm_metal_lite.recurrence.base import StepRecurrence
from vllm_metal_lite.recurrence.sequence_batches import SequenceBatch


class StateHandle(mx.array):
    """Represents one state of a recurrent layer."""

    def __init__(self, key: Key, recurrence: StepRecurrence) -> None:
        super().__init__(mx.zeros(POISON_SHAPE))
        self.key, self.recurrence = key, recurrence


class StateCache(PackedCache):
    """Represents one recurrent layer's states.

    recurrence: the step for modules that work on packed rows; None if modules see sequences.
    """

    lengths = None  # no row is padding, so mlx-lm masks nothing

    def __init__(
        self,
        layer: int,
        size: int,
        recurrence: StepRecurrence | None,
        sequences: SequenceStep | None,
    ) -> None:
        self.layer, self.size = layer, size
        self.recurrence, self.sequences = recurrence, sequences
        self._before: list[Any] = []  # the states before the batch that is being built

    def make_mask(self, num_tokens: int) -> None:
        """No row of a batch is padding, so nothing is masked."""

    # For modules that work on packed rows

    def __getitem__(self, index: int) -> StateHandle:
        if index >= self.size:
            raise IndexError(index)
        if self.recurrence is None:
            raise NotImplementedError("a recurrent state outside the modules that use states")
        return StateHandle((self.layer, index), self.recurrence)

    def __setitem__(self, index: int, state: mx.array) -> None:
        """Nothing to do: the recurrence has written the state."""

    def advance(self, num_tokens: int) -> None:
        """Nothing to do: positions are those of the rows."""

    # For modules that see sequences

    def native(self, seqs: SequenceBatch) -> ArraysCache:
        cache, states = ArraysCache(self.size), self.steps.states
        self._before = [states.get(seqs, (self.layer, i)) for i in range(self.size)]
        cache.cache = list(self._before)
        return cache

    def keep(self, seqs: SequenceBatch, native: Any) -> None:
        states = self.steps.states
        for index, (old, new) in enumerate(zip(self._before, native.cache, strict=True)):
            key = self.layer, index
            if new is old and (old is None or states.has(seqs, key)):
                continue  # for example, another module's state
            states.set(seqs, key, new)
        self._before = []
