"""What every attention path has in common: a step prepared for it, and its pass over a model.

`Attention` belongs to a store and lives as long as the engine.  `prepare` turns a ForwardBatch into
a `Step`, a frozen value.  `begin` binds the step to the state that the previous step left, and
gives a `StepAttention`, which the layers of the model call one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import PAD_SLOT, ForwardBatch
from vllm_metal_lite.kv.store import PagedStore

# MLX arrays in lists and tuples, some of them None: what `mx.compile` takes as an argument.
Arrays = Any


def pad_rows(rows: np.ndarray, num_rows: int, value: int = 0) -> np.ndarray:
    """(n, ...) with more rows behind, all of one value.  (np.pad takes ten times as long.)"""
    if len(rows) == num_rows:
        return rows
    out = np.full((num_rows, *rows.shape[1:]), value, rows.dtype)
    out[: len(rows)] = rows
    return out


class Plan(Protocol):
    """How an attention path attends to one step.  Planned with numpy; its arrays are on the device.

    arrays: everything in the plan that differs between two steps of one variant.
    """

    @property
    def arrays(self) -> Arrays: ...

    def with_arrays(self, arrays: Arrays) -> Self: ...


@dataclass(frozen=True)
class Step:
    """The rows of a ForwardBatch (`batch`, on the host), padded to num_rows.

    token_ids, positions: (num_rows,) int32.  slot_mapping: (num_rows,) int32 a KV group.  A padded
    row has position 0 and its group's padding slot, and any token.
    logits_indices: (R,) int32, those of the batch, then any rows; None: all rows get logits.
    plan: a Plan of the attention path, and read by that path only.
    variant: what a compiled step depends on beside `arrays`; None if a step is not compiled.
    """

    batch: ForwardBatch
    num_rows: int
    token_ids: mx.array
    positions: mx.array
    slot_mapping: tuple[mx.array, ...]
    logits_indices: mx.array | None
    plan: Any
    variant: tuple | None = None

    @property
    def arrays(self) -> Arrays:
        return (
            self.token_ids,
            self.positions,
            self.slot_mapping,
            self.logits_indices,
            self.plan.arrays,
        )

    def with_arrays(self, arrays: Arrays) -> "Step":
        """A step of the same variant with other arrays."""
        token_ids, positions, slot_mapping, logits_indices, of_plan = arrays
        return replace(
            self,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=tuple(slot_mapping),
            logits_indices=logits_indices,
            plan=self.plan.with_arrays(of_plan),
        )


def make_step(
    batch: ForwardBatch,
    num_rows: int,
    plan: Plan,
    *,
    padding_slots: Sequence[int] | None = None,
    num_logits: int = 1,
    variant: tuple | None = None,
) -> Step:
    """The step of a batch under a plan, with the batch's arrays padded and on the device.

    padding_slots: of each KV group, the slot of padded rows; None: -1, which kernels skip.
    num_logits: fewest rows that get logits, unless all do.
    """
    slot_mapping = []
    for group, of_group in enumerate(batch.by_group):
        slots = pad_rows(of_group.slot_mapping, num_rows, PAD_SLOT)
        if padding_slots is not None:
            slots = np.where(slots == PAD_SLOT, padding_slots[group], slots)
        slot_mapping.append(mx.array(slots))
    logits_indices = None
    if len(batch.sample_segments) < batch.num_tokens:
        # A step of nothing but chunks samples nothing.  It names one row all the same; the logits
        # of that row are never read, so they are never computed.
        wanted = batch.logits_indices
        logits_indices = mx.array(pad_rows(wanted, max(len(wanted), num_logits)))
    return Step(
        batch,
        num_rows,
        mx.array(pad_rows(batch.token_ids, num_rows)),
        mx.array(pad_rows(batch.positions, num_rows)),
        tuple(slot_mapping),
        logits_indices,
        plan,
        variant,
    )


class StepAttention(Protocol):
    """One step's pass over the layers of a model.  A layer calls `write` before `attend`."""

    step: Step
    store: PagedStore

    @property
    def state(self) -> list[mx.array]:
        """The state that the next step starts from.  Evaluating it completes all writes."""

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write k, v (num_rows, num_kv_heads, head_dim) of this step's rows to their slots."""

    def attend(
        self,
        layer: int,
        q: mx.array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        q_pe: mx.array | None = None,
        chunk: int | None = None,
    ) -> mx.array:
        """Causal attention of q (num_rows, H, D) to each row's own sequence -> (num_rows, H, Dv).

        window: tokens a query sees, its own included.  softcap: scores become
        softcap * tanh(score / softcap).  sinks: (H,), one logit a head that takes part in the
        softmax and adds no value.  q_pe: (num_rows, H, v_head_dim), for latent attention: a score
        is (q . k + q_pe . v) * scale, and the values are k.  chunk: a query sees only the keys of
        its own chunk of this many positions.
        """


class Attention(Protocol):
    """How packed queries meet the paged store.

    overlaps: a step may be submitted while the previous one runs.
    """

    name: str
    overlaps: bool
    store: PagedStore

    def new_state(self) -> list[mx.array]:
        """The state before the first step, evaluated."""

    def prepare(self, batch: ForwardBatch, num_rows: int) -> Step:
        """Plan a step and put its arrays on the device, its rows padded to num_rows."""

    def begin(self, step: Step, state: list[mx.array]) -> StepAttention:
        """Bind a step to the state that the previous step left."""
