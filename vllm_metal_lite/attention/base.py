"""The interface of every attention path: a prepared step, and its pass over a model.

An `Attention` belongs to one store and lives as long as the engine.  `prepare` turns a ForwardBatch
into a frozen `DeviceBatch`.  `begin` binds the step to the previous step's state and returns a
`StepAttention`, which the model's layers call in order.
"""

from typing import Any, NamedTuple, Protocol

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.recurrence.base import StepRecurrence


class StepPictures(NamedTuple):
    """PictureRows on the device, padded to num_rows."""

    rows: mx.array
    features: mx.array
    deep: tuple[mx.array, ...]
    axes: mx.array | None


class DeviceBatch(NamedTuple):
    """A ForwardBatch on the device: its rows, padded to num_rows, and how they attend.

    batch: the ForwardBatch on the host.
    token_ids, positions: (num_rows,) int32; the positions rotate the rows.  slot_mapping: (num_rows
    or more,) int32 per KV group.
    A padded row has position 0, slot -1, and any token.  Kernels skip slot -1; MLX writes to the
    last slot of the store, which is in no block.
    num_live: (1,) int32, the number of rows before the padding.
    logits_indices: (R,) int32, the batch's indices, followed by padding; None: all rows get logits.
    plan: how the rows attend, in the attention path's own type.  Its `repeats` says whether steps
    of the same shapes are likely to follow, so that compiling this one pays.
    returns_hidden: whether the forward also returns hidden states.
    pictures: None for a step without rows of pictures.
    hidden: (num_rows, 1, hidden_size), the hidden states that a trained head continues from.
    back: (num_rows,) int32, for a step of decodes: how many positions before that of the batch and
    the plan each row really is.  The device may know this before the host; `begin` moves the rows.
    """

    batch: ForwardBatch
    num_rows: int
    token_ids: mx.array
    positions: mx.array
    slot_mapping: tuple[mx.array, ...]
    num_live: mx.array
    logits_indices: mx.array | None
    plan: Any
    returns_hidden: bool
    pictures: StepPictures | None = None
    hidden: mx.array | None = None
    back: mx.array | None = None


class AttentionCall(NamedTuple):
    """What a layer asks of attention, without its queries (num_rows, H, D).

    q_pe: (num_rows, H, v_head_dim), for latent attention: a score is (q . k + q_pe . v) * scale,
    and the values are k.  attention_chunk: the length of a chunk of positions; a query sees only
    the keys of its own chunk.
    """

    layer: int
    scores: Scores
    q_pe: mx.array | None = None
    attention_chunk: int | None = None


class StepAttention(Protocol):
    """One step's pass over the layers of a model.  A layer calls `write` before `attend`."""

    step: DeviceBatch
    store: PagedStore

    @property
    def recurrence(self) -> StepRecurrence:
        """The step's pass over recurrent layers."""

    @property
    def state(self) -> list[mx.array]:
        """The next step's initial state.  Evaluating it completes all writes."""

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Write this step's k, v (num_rows, num_kv_heads, head_dim) to their slots."""

    def attend(self, q: mx.array, call: AttentionCall) -> mx.array:
        """Causal attention of rows (num_rows, H, D) to their own sequences -> (num_rows, H, Dv)."""


class Attention(Protocol):
    """Attention of packed queries over the paged store.

    overlaps: whether a step may be submitted while the previous one runs.
    """

    name: str
    overlaps: bool
    store: PagedStore

    def new_state(self) -> list[mx.array]:
        """The state before the first step, evaluated."""

    def prepare(self, batch: ForwardBatch, num_rows: int) -> DeviceBatch:
        """Plan a step, pad its rows to num_rows, and copy its arrays to the device."""

    def begin(self, step: DeviceBatch, state: list[mx.array]) -> StepAttention:
        """Bind a step to the previous step's state."""
