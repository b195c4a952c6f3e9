"""Recurrent layers through the kernels of metal/: one launch for all segments of a step."""

from typing import NamedTuple, Protocol

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, ForwardBatch
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.gated_delta import CHUNK, gated_delta
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.segments import plan_segments
from vllm_metal_lite.kernels.ssm import ssm_update
from vllm_metal_lite.kv.states import Key, StatePool
from vllm_metal_lite.recurrence.base import CausalConv, GatedDelta, StateSpace


class SegmentPlan(NamedTuple):
    """A step's segments, as the kernels read them (kernels/segments.py).

    segments: (S + 1 or more, 2 + 2 M) int32.  tiles: (T, 2) int32, of the convolutions.
    max_seqlen: at least the rows of the longest segment; one of two values, so that steps repeat.
    """

    segments: mx.array
    tiles: mx.array
    max_seqlen: int

    @staticmethod
    def plan(
        batch: ForwardBatch, num_rows: int, num_segments: int, num_slots: int
    ) -> "SegmentPlan":
        """The plan of a step padded to num_rows rows and num_segments segments."""
        missing = num_segments - batch.num_segments
        empty = np.full(missing, EMPTY_SLOT, np.int32)
        cu = batch.cu_seqlens_q
        segments = plan_segments(
            np.concatenate([cu, np.full(missing, cu[-1], cu.dtype)]),
            np.concatenate([batch.initial_slots, empty]),
            np.concatenate([batch.final_slots, empty]),
            num_rows,
            num_slots,
            batch.checkpoints.tolist(),
        )
        longest = int(np.diff(cu).max())
        return SegmentPlan(
            mx.array(segments),
            mx.array(plan_conv_tiles(segments)),
            CHUNK if longest >= CHUNK else 1,
        )

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        return self.segments, self.tiles

    def with_arrays(self, arrays: tuple[mx.array, mx.array]) -> "SegmentPlan":
        segments, tiles = arrays
        return self._replace(segments=segments, tiles=tiles)


class Ordered(Protocol):
    """What launches on one store share: each takes the token, and leaves the next one."""

    token: mx.array


class KernelRecurrence:
    """See StepRecurrence.  order: whose token orders these launches too."""

    def __init__(self, pool: StatePool, plan: SegmentPlan, order: Ordered) -> None:
        self.pool, self.plan, self.order = pool, plan, order

    def causal_conv(self, key: Key, conv: CausalConv) -> mx.array:
        y, self.order.token = causal_conv(
            Columns(conv.x, 0), conv.weight, conv.bias, self.pool[key], self.plan.segments,
            self.plan.tiles, self.order.token, silu=conv.silu,
        )  # fmt: skip
        return y

    def gated_delta(self, key: Key, delta: GatedDelta) -> mx.array:
        y, self.order.token = gated_delta(
            _columns(delta.q), _columns(delta.k), _columns(delta.v), delta.gates, delta.beta,
            self.pool[key], self.plan.segments, self.order.token,
            num_k_heads=delta.q.shape[1], max_seqlen=self.plan.max_seqlen,
        )  # fmt: skip
        return y

    def state_space(self, key: Key, update: StateSpace) -> mx.array:
        y, self.order.token = ssm_update(
            _columns(update.x), _columns(update.b), _columns(update.c), update.time_steps,
            -mx.exp(update.A_log.astype(mx.float32)), update.d, self.pool[key],
            self.plan.segments, self.order.token,
            num_groups=update.b.shape[1], max_seqlen=self.plan.max_seqlen,
        )  # fmt: skip
        return y


def _columns(heads: mx.array) -> Columns:
    """Heads (N, H, D) side by side."""
    return Columns(heads.reshape(len(heads), -1), 0)
