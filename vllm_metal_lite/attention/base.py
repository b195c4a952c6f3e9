"""What attention knows of one step, on the device, and the form that every attention path has."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol, Self

import numpy as np

from vllm_metal_lite.attention.upload import upload
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import PAD_SLOT, ForwardBatch
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
    kv_bits: int | None = None

    def __str__(self) -> str:
        dims = {self.k_head_dim: None, self.v_head_dim: None}
        text = f"{self.num_heads}/{self.num_kv_heads} heads of {'/'.join(map(str, dims))} "
        text += str(self.dtype).removeprefix("mlx.core.")
        text += f", window {self.window}" if self.window is not None else ""
        text += f", softcap {self.softcap:g}" if self.softcap is not None else ""
        text += f", chunks of {self.chunk}" if self.chunk is not None else ""
        text += f", KV in {self.kv_bits} bits" if self.kv_bits is not None else ""
        return text + (", sinks" if self.sinks else "") + (", latent" if self.latent else "")


def pad_rows(rows: np.ndarray, num_rows: int, value: int = 0) -> np.ndarray:
    """(n, ...) with more rows behind, all of one value.  (np.pad takes ten times as long.)"""
    if len(rows) == num_rows:
        return rows
    out = np.full((num_rows, *rows.shape[1:]), value, rows.dtype)
    out[: len(rows)] = rows
    return out


class StepMetadata:
    """The rows of a ForwardBatch (batch, on the host), padded to num_rows; see `on_device`.

    token_ids, positions: (num_rows,) int32.  slot_mapping: (num_rows,) int32 a KV group.  A padded
    row has position 0 and its group's padding slot, and any token.
    logits_indices: (R,) int32, the batch's, any rows behind them; None: of all rows, since each is
    its segment's last.  R is num_logits if that is more.
    arrays: the names of all that differs between two steps of one variant.
    variant: what a compiled step depends on beside arrays; None if it depends on more than that.
    """

    arrays: tuple[str, ...] = ("token_ids", "positions", "slot_mapping", "logits_indices")
    variant: tuple | None = None

    def __init__(
        self,
        batch: ForwardBatch,
        num_rows: int,
        padding_slots: Sequence[int] | None = None,
        num_logits: int = 1,
    ) -> None:
        self.batch, self.num_rows = batch, num_rows
        self.token_ids = pad_rows(batch.token_ids, num_rows)
        self.positions = pad_rows(batch.positions, num_rows)
        self.slot_mapping = []
        for g, of_group in enumerate(batch.by_group):
            slots = pad_rows(of_group.slot_mapping, num_rows, PAD_SLOT)
            if padding_slots is not None:
                slots = np.where(slots == PAD_SLOT, padding_slots[g], slots)
            self.slot_mapping.append(slots)
        self.logits_indices = None
        if len(batch.sample_segments) < batch.num_tokens:
            # A step of nothing but chunks wants no logits; lazily, asking for a row costs nothing.
            wanted = batch.logits_indices
            self.logits_indices = pad_rows(wanted, max(len(wanted), num_logits))

    def on_device(self) -> Self:
        """The same, its arrays no longer numpy's but MLX's."""
        step = self.with_arrays(upload([getattr(self, name) for name in self.arrays]))
        step.batch = self.batch
        return step

    def with_arrays(self, arrays: Sequence[Any] | None) -> Self:
        """A step of the same variant with other `arrays`, or with none, and without a batch."""
        step = copy(self)
        step.batch = None
        for name, array in zip(self.arrays, arrays or repeat(None), strict=False):
            setattr(step, name, array)
        return step


class Attention(Protocol):
    """How packed queries meet the paged store.  `write` of a layer comes before its `attend`.

    overlaps: a step may be submitted while the one before it runs.
    fuses: the kernels that do several launches' work may be used, `rope_write` among them.
    skinny_rows: where it fuses, products of so many rows go through `skinny_gemm`.
    """

    name: str
    overlaps: bool
    fuses: bool
    skinny_rows: range
    store: PagedStore

    @property
    def state(self) -> list[mx.array]:
        """What must be evaluated at the end of a step, so that its writes have happened.

        A path whose steps have a `variant` also takes it: a compiled step gets the state as
        arguments and returns the next one.
        """

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
