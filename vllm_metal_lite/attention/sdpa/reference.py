"""Attention and K/V writes in MLX operations: runs on every backend; the oracle for kernels.

The interface follows flash-attention's varlen call: packed queries (N, H, D), the layer's paged
store, the step's metadata.  Attention reads keys only from the store, after this step's writes: a
segment may share blocks that another segment of the same step fills.
"""

from functools import partial

from vllm_metal_lite.attention.base import AttentionCall, DeviceBatch
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan
from vllm_metal_lite.attention.sdpa.execute import execute_calls
from vllm_metal_lite.attention.step_arrays import make_step, planned_earlier
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.recurrence.reference import ReferenceRecurrence


class ReferenceAttention:
    """Scatters K and V into the store, gathers K and V for SDPA.

    The state is the store itself.  Writes are in place only while nothing else reads the arrays, so
    a step is submitted after the previous step has ended.
    """

    name = "reference"
    overlaps = False

    def __init__(self, store: PagedStore) -> None:
        self.store = store

    def new_state(self) -> list[mx.array]:
        return self.store.arrays

    def prepare(self, batch: ForwardBatch, num_rows: int) -> DeviceBatch:
        return make_step(batch, num_rows, SdpaPlan(batch, num_rows))

    def begin(self, step: DeviceBatch, state: list[mx.array]) -> "ReferenceStepAttention":
        return ReferenceStepAttention(self.store, planned_earlier(self, step))


class ReferenceStepAttention:
    """See StepAttention."""

    def __init__(self, store: PagedStore, step: DeviceBatch) -> None:
        self.store, self.step = store, step
        self.plan: SdpaPlan = step.plan
        self.recurrence = ReferenceRecurrence(store.states, step.batch, step.num_rows)

    @property
    def state(self) -> list[mx.array]:
        return self.store.arrays

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        self.store.write(layer, k, v, self.step.slot_mapping[self.store.group_of[layer]])

    def attend(self, q: mx.array, call: AttentionCall) -> mx.array:
        gather = partial(self._gather, call.layer)
        return execute_calls(self.plan, self.store.group_of[call.layer], q, call, gather)

    def _gather(self, layer: int, slots: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values, (num_kv_heads, K, head_dim): one gather of a row per slot and head."""
        spec = self.store.specs[layer]
        rows = slots * spec.num_kv_heads + mx.arange(spec.num_kv_heads)[:, None]
        keys, values = self.store.keys[layer], self.store.values[layer]
        k, v = (kept.reshape(-1, kept.shape[2])[rows] for kept in (keys, values))
        return spec.k_row.unpack(k), spec.v_row.unpack(v)
