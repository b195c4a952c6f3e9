"""What attention knows of one step, on the device, and the form that every attention path has."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import PAD_SLOT, ForwardBatch
from vllm_metal_lite.kv.store import PagedStore


@dataclass(frozen=True)
class AttentionShape:
    """What distinguishes one attention call of a model from another, but for the batch."""

    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False
    chunk: int | None = None

    def __str__(self) -> str:
        dims = {self.k_head_dim: None, self.v_head_dim: None}
        text = f"{self.num_heads}/{self.num_kv_heads} heads of {'/'.join(map(str, dims))} "
        text += str(self.dtype).removeprefix("mlx.core.")
        text += f", window {self.window}" if self.window is not None else ""
        text += f", softcap {self.softcap:g}" if self.softcap is not None else ""
        text += f", chunks of {self.chunk}" if self.chunk is not None else ""
        return text + (", sinks" if self.sinks else "") + (", latent" if self.latent else "")


class StepMetadata:
    """The rows of a ForwardBatch (batch, on the host) on the device, padded to num_rows.

    token_ids, positions, slot_mapping: (num_rows,) int32.  A padded row has token and position 0,
    and padding_slot.
    """

    def __init__(self, batch: ForwardBatch, num_rows: int, padding_slot: int = PAD_SLOT) -> None:
        self.batch, self.num_rows = batch, num_rows
        pad = (0, num_rows - batch.num_tokens)
        self.token_ids = mx.array(np.pad(batch.token_ids, pad))
        self.positions = mx.array(np.pad(batch.positions, pad))
        slots = np.pad(batch.slot_mapping, pad, constant_values=PAD_SLOT)
        self.slot_mapping = mx.array(np.where(slots == PAD_SLOT, padding_slot, slots))


class Attention(Protocol):
    """How packed queries meet the paged store.  `write` of a layer comes before its `attend`."""

    name: str
    store: PagedStore

    @property
    def state(self) -> list[mx.array]:
        """What must be evaluated at the end of a step, so that its writes have happened."""

    def prepare(self, batch: ForwardBatch, num_rows: int) -> StepMetadata:
        """Put a step's metadata on the device, its rows padded to num_rows."""

    def write(self, layer: int, k: mx.array, v: mx.array, step: StepMetadata) -> None:
        """Write k, v (num_rows, num_kv_heads, head_dim) of this step's rows to their slots."""

    def attend(
        self,
        layer: int,
        q: mx.array,
        step: StepMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        q_pe: mx.array | None = None,
        chunk: int | None = None,
    ) -> mx.array:
        """Causal attention of q (num_rows, H, D) to each row's own sequence, of the same shape but
        for the last axis, v_head_dim.

        window: tokens a query sees, its own included.  softcap: scores become
        softcap * tanh(score / softcap).  sinks: (H,), a logit each that takes weight, gives none.
        q_pe: (num_rows, H, v_head_dim), latent attention: a score is (q . k + q_pe . v) * scale,
        and what is weighed and summed is k.  chunk: a query sees the keys of its own chunk of so
        many positions only.
        """
