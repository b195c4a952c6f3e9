"""Recurrent layers through the kernels of metal/: one launch for all segments of a step.

A request keeps a state in a slot of the state store, not a row per token.  So a segment names the
slot that it starts from, and the slots that take its state: at its end, and at checkpoints before
its end.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, ForwardBatch
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, power_of_two
from vllm_metal_lite.kernels.recurrence import Gates, QKNorm, column_gates, delta_gates, time_gates
from vllm_metal_lite.kv.state_store import Key, StateStore
from vllm_metal_lite.recurrence.base import CausalConv, GatedDelta, StateSpace
from vllm_metal_lite.recurrence.tracked_columns import columns_of

# This initial slot marks rows of no request.  Their results are zeros.
PADDING = -2


def pack_segments(
    cu_seqlens: np.ndarray,
    initial_slots: np.ndarray,
    final_slots: np.ndarray,
    num_rows: int,
    checkpoints: Iterable[tuple[int, int, int]] = (),
    num_segments: int = 0,
) -> np.ndarray:
    """Return the S segments of a step as the kernels read them: (S + 1 or more, 2 + 2 M) int32.

    cu_seqlens: (S+1,), empty segments allowed.  initial_slots: (S,), the slot whose state a segment
    starts from; EMPTY_SLOT: zeros.  final_slots: (S,), the slot that takes the state after the
    segment; EMPTY_SLOT: none.  num_rows: packed rows, padding included.  checkpoints: (segment,
    row, slot): `slot` takes the state that `segment` has before packed row `row`.
    num_segments: the result has at least num_segments + 1 rows.
    `ForwardBatch.validate` has checked these numbers: a wrong index in a kernel would corrupt
    memory.

    A row of the result is begin, initial slot, and M pairs (end, slot) in order of their ends.  The
    last pair is the segment's own end; a segment with fewer checkpoints than others has pairs
    (begin, EMPTY_SLOT) first.  M is a power of two, so that shapes repeat.  The padding is segment
    S; segments behind it have no rows.  All columns are fixed by the step, so one array serves all
    layers.
    """
    ends, begins = cu_seqlens[1:], cu_seqlens[:-1]
    inside = {s: list(of) for s, of in groupby(sorted(checkpoints), key=itemgetter(0))}
    pairs = power_of_two(1 + max(map(len, inside.values()), default=0))
    segments = np.full((len(begins) + 1, 2 + 2 * pairs), EMPTY_SLOT, np.int32)
    segments[:-1, 0], segments[:-1, 1] = begins, initial_slots
    segments[-1, 0], segments[-1, 1] = cu_seqlens[-1], PADDING
    segments[:, 2::2] = segments[:, :1]
    segments[:-1, -2], segments[:-1, -1] = ends, final_slots
    segments[-1, -2] = num_rows
    for s, of in inside.items():
        for column, (_, row, slot) in enumerate(of, pairs - 1 - len(of)):
            segments[s, 2 + 2 * column : 4 + 2 * column] = row, slot
    fewest = max(num_segments + 1, -(-MIN_ELEMENTS // segments.shape[1]))
    missing = max(0, fewest - len(segments))
    nothing = np.full((missing, segments.shape[1]), EMPTY_SLOT, np.int32)
    nothing[:, 1], nothing[:, 0], nothing[:, 2::2] = PADDING, num_rows, num_rows
    return np.concatenate([segments, nothing])


class SegmentPlan(NamedTuple):
    """A step's segments, as the kernels read them (`pack_segments`).

    segments: (S + 1 or more, 2 + 2 M) int32.  tiles: (T, 2) int32, the tiles of the convolutions.
    max_seqlen: 1 if no segment has more rows, otherwise 2, whatever the length, so that steps
    repeat.
    """

    segments: mx.array
    tiles: mx.array
    max_seqlen: int

    @staticmethod
    def plan(batch: ForwardBatch, num_rows: int) -> "SegmentPlan":
        """The plan of a step padded to num_rows rows.

        The number of segments is rounded, so that shapes repeat.
        """
        prompts = batch.num_segments - batch.num_decodes
        num_segments = batch.num_decodes + power_of_two(prompts) if prompts else num_rows
        segments = pack_segments(
            batch.cu_seqlens_q,
            batch.initial_slots,
            batch.final_slots,
            num_rows,
            batch.checkpoints.tolist(),
            num_segments,
        )
        longest = int(np.diff(batch.cu_seqlens_q).max())
        return SegmentPlan(
            mx.array(segments), mx.array(plan_conv_tiles(segments)), 2 if longest > 1 else 1
        )


class KernelRecurrence:
    """See StepRecurrence.

    order: an object with the `ticket` that each launch on a store takes and replaces.
    """

    def __init__(self, state_store: StateStore, plan: SegmentPlan, order: Any) -> None:
        self.state_store, self.plan, self.order = state_store, plan, order

    def causal_conv(self, key: Key, conv: CausalConv) -> mx.array:
        where = self.state_store[key], self.plan.segments, self.plan.tiles, self.order.ticket
        x = columns_of(conv.x)
        y, self.order.ticket = causal_conv(x, conv.weight, conv.bias, *where, silu=conv.silu)
        return y

    def gated_delta(self, key: Key, delta: GatedDelta) -> mx.array:
        columns = columns_of(delta.q), columns_of(delta.k), columns_of(delta.v)
        b, scale = columns_of(delta.b), 2 if delta.allow_neg_eigval else 1
        if delta.is_vector:
            gates = column_gates(delta.gates.squeeze(1), b, beta_scale=scale)
        else:
            rate, bias = delta.A_log.reshape(-1), delta.dt_bias.reshape(-1)
            a, low = columns_of(delta.a), delta.lower_bound
            gates = delta_gates(a, b, rate, bias, lower_bound=low, beta_scale=scale)
        return self._launch(key, columns, gates, delta.q.shape[-2], norm=delta.norm)

    def state_space(self, key: Key, update: StateSpace) -> mx.array:
        limits = update.time_step_limit
        gates = time_gates(columns_of(update.dt), update.A_log, update.dt_bias, limits)
        columns = columns_of(update.c), columns_of(update.b), columns_of(update.x)
        return self._launch(key, columns, gates, update.b.shape[-2], skip=update.d)

    def _launch(
        self,
        key: Key,
        columns: tuple[Columns, Columns, Columns],
        gates: Gates,
        num_k_heads: int,
        norm: QKNorm | None = None,
        skip: mx.array | None = None,
    ) -> mx.array:
        """Launch `gated_delta`.  columns: those of q, k and v."""
        inputs = *columns, gates, self.state_store[key], self.plan.segments, self.order.ticket
        longest = self.plan.max_seqlen
        y, self.order.ticket = gated_delta(
            *inputs, num_k_heads=num_k_heads, max_seqlen=longest, norm=norm, skip=skip
        )
        return y
