"""Attention and K/V writes through the kernels of metal/, on Metal and CUDA.

Decode rows go through `paged_decode`, which reads the store in place.  Prompts, whole or in chunks,
go through MLX's SDPA on what `kv_gather` copies out of the store, cut into calls as the reference
does, or through `varlen_prefill`, which reads the store in place too.
"""

import numpy as np

from vllm_metal_lite.attention.reference import DeviceGroup, ReferenceAttention, SdpaPlan
from vllm_metal_lite.attention.step import StepMetadata
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import ForwardBatch
from vllm_metal_lite.kernels import ops
from vllm_metal_lite.kv.store import PagedStore


class KernelStep(StepMetadata):
    """A step whose first num_decodes rows are decodes, and the rest prompts.

    block_tables (num_decodes, W) and seq_lens (num_decodes,) int32 are of the decodes; in a step of
    nothing else they cover the padded rows too, with a seq_len of 0.  W is a power of two, so that
    shapes repeat from step to step.
    """

    def __init__(self, batch: ForwardBatch, num_rows: int) -> None:
        super().__init__(batch, num_rows)
        count = batch.num_decodes
        self.sdpa = None
        if count < batch.num_segments:
            self.sdpa = SdpaPlan(batch.prefills(), num_rows - count)
        self.num_decodes = count if self.sdpa else num_rows
        if not count:
            return
        self.max_seq_len = int(batch.seq_lens[:count].max())
        width = -(-self.max_seq_len // batch.block_size)
        tables = np.zeros((self.num_decodes, 1 << (width - 1).bit_length()), np.int32)
        tables[:count, :width] = batch.block_tables[:count, :width]
        seq_lens = np.zeros(self.num_decodes, np.int32)
        seq_lens[:count] = batch.seq_lens[:count]
        self.block_tables, self.seq_lens = mx.array(tables), mx.array(seq_lens)


class KernelAttention(ReferenceAttention):
    """The store is written and read by kernels only; a token a layer keeps them in order."""

    name = "kernels"

    def __init__(self, store: PagedStore) -> None:
        super().__init__(store)
        self.tokens = [ops.new_token() for _ in store.keys]

    @property
    def state(self) -> list[mx.array]:
        return self.tokens

    def prepare(self, batch: ForwardBatch, num_rows: int) -> KernelStep:
        return KernelStep(batch, num_rows)

    def write(self, layer: int, k: mx.array, v: mx.array, step: StepMetadata) -> None:
        dtype = self.store.keys[layer].dtype
        rows = k.astype(dtype), v.astype(dtype)
        self.tokens[layer] = ops.kv_write(*rows, step.slot_mapping, *self._store(layer))

    def gather(self, layer: int, group: DeviceGroup) -> tuple[mx.array, mx.array]:
        k, v, self.tokens[layer] = ops.kv_gather(group.kv_slots, *self._store(layer))
        return k, v

    def attend(
        self,
        layer: int,
        q: mx.array,
        step: KernelStep,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        how = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        outputs = []
        if step.num_decodes:
            out, self.tokens[layer] = ops.paged_decode(
                q[: step.num_decodes].astype(self.store.keys[layer].dtype),
                step.block_tables,
                step.seq_lens,
                *self._store(layer),
                block_size=self.store.block_size,
                plan=ops.decode_plan(
                    step.num_decodes, q.shape[1], self.store.keys[layer].shape[1], step.max_seq_len
                ),
                **how,
            )
            outputs.append(out.astype(q.dtype))
        if step.sdpa:
            outputs.append(super().attend(layer, q[step.num_decodes :], step, **how))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _store(self, layer: int) -> tuple[mx.array, mx.array, mx.array]:
        return self.store.keys[layer], self.store.values[layer], self.tokens[layer]
