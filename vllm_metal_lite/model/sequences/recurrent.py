"""The cache of a recurrent layer during a packed forward.

Mamba, RWKV, gated delta nets, short convolutions, linear attention: mlx-lm keeps their state in an
`ArraysCache` of a few arrays (B, ...).  Modules that use the state see sequences (runs.py), with
all decodes as one batch.  The store keeps the states by seat (kv/recurrent_state.py).
"""

from typing import Any

from mlx_lm.models.cache import ArraysCache

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.sequences.runs import PackedCache, Run, SequenceStep


class StateCache(PackedCache):
    """Stands for one recurrent layer's states; modules that see sequences get real ones."""

    def __init__(self, layer: int, size: int, sequences: SequenceStep | None) -> None:
        self.layer, self.size, self.sequences = layer, size, sequences

    def make_mask(self, num_tokens: int) -> None:
        """No row of a run is padding, so nothing is masked."""

    def native(self, run: Run, steps: SequenceStep) -> ArraysCache:
        cache = ArraysCache(self.size)
        states: list[Any] = [steps.states.get(run.index, (self.layer, i)) for i in range(self.size)]
        cache.cache = states
        self._before = list(states)
        return cache

    def keep(self, run: Run, native: Any, steps: SequenceStep) -> None:
        for slot, (old, new) in enumerate(zip(self._before, native.cache, strict=True)):
            if new is old and (old is None or steps.states.has(run.index, (self.layer, slot))):
                continue  # for example, another module's slot
            # A view of a chunk's last rows would keep the whole chunk alive.
            new = mx.contiguous(new) if run.length > 1 else new
            steps.states.set(run.index, (self.layer, slot), new)
