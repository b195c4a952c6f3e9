"""KernelAttention without kernels: decodes by MLX operations that depend on nothing but arrays.

So whole steps can be compiled on a CPU, where host kernels cannot (they need values).  K and V are
the state: they go into a compiled step and come out of it.
"""

from vllm_metal_lite.attention.kernels import KernelAttention
from vllm_metal_lite.attention.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.runner import ModelRunner

_sdpa = mx.fast.scaled_dot_product_attention


class ArrayAttention(KernelAttention):
    """Slot -1, of a padded row, is the last one of the store's scratch block."""

    overlaps = False

    def __init__(self, store) -> None:
        super().__init__(store, "gather", fuses=False)

    @property
    def state(self):
        return self.store.arrays

    @state.setter
    def state(self, state):
        half = len(state) // 2
        self.store.keys, self.store.values = list(state[:half]), list(state[half:])

    write = ReferenceAttention.write
    gather = ReferenceAttention.gather

    def attend(self, layer, q, step, *, scale, window=None, softcap=None, sinks=None):
        assert softcap is sinks is None
        outputs = []
        if step.num_decodes:
            size = self.store.block_size
            table = step.block_tables[self.store.group_of[layer]]
            slots = (table[:, :, None] * size + mx.arange(size)).flatten(1)
            k, v = (a[layer][slots].swapaxes(1, 2) for a in (self.store.keys, self.store.values))
            at, end = mx.arange(slots.shape[1]), step.seq_lens[:, None]
            seen = at < end
            if window is not None:
                seen = seen & (at >= end - window)
            mask = mx.where(seen, 0.0, -mx.inf).astype(q.dtype)[:, None, None]
            rows = q[: step.num_decodes, :, None]
            outputs.append(_sdpa(rows, k, v, scale=scale, mask=mask).squeeze(2))
        if step.prompts:
            rows = q[step.num_decodes :]
            outputs.append(
                ReferenceAttention.attend(
                    self, layer, rows, step.prompts, scale=scale, window=window
                )
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def compile_on_cpu(engine: LLMEngine) -> LLMEngine:
    """Put ArrayAttention into an engine and have its decode steps compiled."""
    attention = ArrayAttention(engine.runner.attention.store)
    engine.runner = ModelRunner(engine.model.packed, attention, engine.sampler)
    engine.runner.compiled.reason = None
    return engine
