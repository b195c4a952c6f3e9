"""KernelAttention without kernels: its rows by MLX operations that depend on nothing but arrays.

So whole steps can be compiled on a CPU, where host kernels cannot (they need values).  K and V are
the state: they go into a compiled step and come out of it.
"""

from copy import copy
from functools import partial

from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.paged.step import VarlenPrompts, WholePrompt
from vllm_metal_lite.attention.sdpa.execute import attend_whole_prompt, execute_calls
from vllm_metal_lite.attention.sdpa.reference import ReferenceStepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.pictures import sees_spans
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.runner.step_path import StepPath

_sdpa = mx.fast.scaled_dot_product_attention


class ArrayAttention(KernelAttention):
    """Its state is the store's K and V."""

    overlaps = False

    def new_state(self):
        return self.store.arrays

    def begin(self, step, state):
        return ArrayStepAttention(self, step, state)


class ArrayStepAttention(ReferenceStepAttention):
    """A step over a copy of the store that holds the state's arrays.

    Slot -1, of a padded row, is the last one of the store's scratch block.
    """

    def __init__(self, attention, step, state) -> None:
        store, half = copy(attention.store), len(state) // 2
        # A write replaces what an array object holds, and the state is the previous step's.
        arrays = [copy(a) for a in state]
        store.keys, store.values = arrays[:half], arrays[half:]
        super().__init__(store, step)
        self.attention = attention

    def write(self, layer, k, v):
        slots = self.step.slot_mapping[self.store.group_of[layer]]
        self.store.write(layer, k, v, slots[: len(k)])

    def attend(self, q, call):
        layer, (scale, window, *_) = call[:2]
        assert call == AttentionCall(layer, Scores(scale, window))
        outputs, plan = [], self.step.plan
        group, prompts = self.store.group_of[layer], plan.prompts
        if decodes := plan.decodes:
            tables, count = decodes.block_tables[group], decodes.num_rows
            if decodes.prefix and self.attention.shares[layer]:
                # As if only the leader had its blocks.
                blocks = decodes.prefix.lens[:count, None] // self.store.block_size
                shared = mx.arange(tables.shape[1]) < blocks
                tables = mx.where(shared, tables[decodes.prefix.leader], tables)
            k, v = self._keys_and_values(layer, tables)
            at, end = mx.arange(k.shape[2]), decodes.seq_lens[:count, None]
            mask = self._mask(at < end, at, end - 1, window, q.dtype)[:, None, None]
            rows = q[:count, :, None]
            outputs.append(_sdpa(rows, k, v, scale=scale, mask=mask).squeeze(2))
        rows = q[plan.num_decodes :]
        if isinstance(prompts, VarlenPrompts):
            # Planned before the step is traced, for what the layers need.
            assert q.shape[1] // self.store.specs[layer].num_kv_heads in prompts.tiles
            outputs.append(self._varlen(layer, rows, prompts, scale, window))
        elif isinstance(prompts, WholePrompt):
            k, v = self._gather(layer, prompts.slots[group])
            outputs.append(attend_whole_prompt(rows, k, v, call.scores))
        elif prompts is not None:
            outputs.append(execute_calls(prompts, group, rows, call, partial(self._gather, layer)))
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

    def _varlen(self, layer, q, prompts, scale, window):
        """Each segment over all rows; what is not its own is thrown away."""
        tables = prompts.block_tables[self.store.group_of[layer]]
        cu, lengths = prompts.cu_seqlens_q, prompts.seq_lens
        row, out = mx.arange(len(q))[:, None], mx.zeros_like(q)
        spans = prompts.spans if sees_spans(prompts.only_windowed, window) else None
        for s in range(len(tables)):
            k, v = self._keys_and_values(layer, tables[s : s + 1])
            at, position = mx.arange(k.shape[2]), lengths[s] - cu[s + 1] + row
            mask = self._mask(at <= position, at, position, window, q.dtype)
            if spans is not None:
                own = spans[: len(q)]
                mask = mx.where((at >= own[:, :1]) & (at < own[:, 1:]), 0.0, mask).astype(q.dtype)
            rows = _sdpa(q.swapaxes(0, 1)[None], k, v, scale=scale, mask=mask)[0].swapaxes(0, 1)
            own = (row >= cu[s]) & (row < cu[s + 1])
            out = mx.where(own[:, :, None], rows, out)
        return out


class ArrayRunner(ModelRunner):
    """The state's arrays are the store's between two steps: tests look at them there."""

    def _prepare(self, batch, after):
        self._state = self.attention.store.arrays
        return super()._prepare(batch, after)

    def _submit(self, result, state):
        super()._submit(result, state)
        store, half = self.attention.store, len(state) // 2
        store.keys, store.values = state[:half], state[half:]


def compile_on_cpu(engine: LLMEngine, prefill: str = "gather") -> LLMEngine:
    """Put ArrayAttention into an engine and have its steps compiled."""
    store, shapes = engine.runner.attention.store, engine.model.attention_shapes
    attention = ArrayAttention(store, prefill, shapes)
    engine.in_flight.pipeline.runner = ArrayRunner(
        engine.model.packed, StepPath(attention), engine.runner.sampler
    )
    engine.runner.compiled.reason = None
    return engine
