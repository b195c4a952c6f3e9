"""KernelAttention without kernels: its rows by MLX operations that depend on nothing but arrays.

So whole steps can be compiled on a CPU, where host kernels cannot (they need values).  K and V are
the state: they go into a compiled step and come out of it.
"""

from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.paged.prompts import VarlenPrompts
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.runner.runner import ModelRunner

_sdpa = mx.fast.scaled_dot_product_attention


class ArrayAttention(KernelAttention):
    """Slot -1, of a padded row, is the last one of the store's scratch block."""

    overlaps = False

    def __init__(self, store, prefill, groups, rows_as_decodes=0) -> None:
        super().__init__(store, prefill, False, groups, rows_as_decodes=rows_as_decodes)

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
        group = self.store.group_of[layer]
        if step.num_decodes:
            tables = step.block_tables[group]
            if step.prefix_len and self._shares[layer]:  # as if only the leader had its blocks
                shared = (
                    mx.arange(tables.shape[1]) < step.prefix_lens[:, None] // self.store.block_size
                )
                tables = mx.where(shared, tables[step.leader], tables)
            k, v = self._keys_and_values(layer, tables)
            at, end = mx.arange(k.shape[2]), step.seq_lens[:, None]
            mask = self._mask(at < end, at, end - 1, window, q.dtype)[:, None, None]
            rows = q[: step.num_decodes, :, None]
            outputs.append(_sdpa(rows, k, v, scale=scale, mask=mask).squeeze(2))
        rows = q[step.num_decodes :]
        if isinstance(step.prompts, VarlenPrompts):
            tables, cu, lengths = step.prompts.metadata(group)
            # They cannot be planned while a step is traced.
            step.prompts.tiles(q.shape[1] // self.store.specs[layer].num_kv_heads)
            outputs.append(self._varlen(layer, rows, tables, cu, lengths, scale, window))
        elif step.prompts:
            outputs.append(
                ReferenceAttention.attend(
                    self, layer, rows, step.prompts, scale=scale, window=window
                )
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _keys_and_values(self, layer, tables):
        """All of each sequence's blocks, (B, num_kv_heads, keys, head_dim)."""
        size, spec = self.store.block_size, self.store.specs[layer]
        slots = (tables[:, :, None] * size + mx.arange(size)).flatten(1)
        kept = (self.store.keys, spec.k_row), (self.store.values, spec.v_row)
        return (row.unpack(arrays[layer][slots]).swapaxes(1, 2) for arrays, row in kept)

    def _mask(self, seen, at, position, window, dtype):
        if window is not None:
            seen = seen & (at > position - window)
        return mx.where(seen, 0.0, -mx.inf).astype(dtype)

    def _varlen(self, layer, q, tables, cu, lengths, scale, window):
        """Each segment over all rows; what is not its own is thrown away."""
        row, out = mx.arange(len(q))[:, None], mx.zeros_like(q)
        for s in range(len(tables)):
            k, v = self._keys_and_values(layer, tables[s : s + 1])
            at, position = mx.arange(k.shape[2]), lengths[s] - cu[s + 1] + row
            mask = self._mask(at <= position, at, position, window, q.dtype)
            rows = _sdpa(q.swapaxes(0, 1)[None], k, v, scale=scale, mask=mask)[0].swapaxes(0, 1)
            own = (row >= cu[s]) & (row < cu[s + 1])
            out = mx.where(own[:, :, None], rows, out)
        return out


def compile_on_cpu(
    engine: LLMEngine, prefill: str = "gather", rows_as_decodes: int = 0
) -> LLMEngine:
    """Put ArrayAttention into an engine and have its steps compiled."""
    groups = {s.num_heads // s.num_kv_heads for s in engine.model.attention_shapes}
    attention = ArrayAttention(engine.runner.attention.store, prefill, groups, rows_as_decodes)
    engine.pipeline.runner = ModelRunner(engine.model.packed, attention, engine.sampler)
    engine.runner.compiled.reason = None
    return engine
