"""Recurrent layers in MLX operations: runs on every backend; the oracle for kernels.

Each batch of sequences (sequence_batches.py) is one call of mlx-lm's own function.
"""

from collections.abc import Callable
from functools import cached_property, partial

import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.ssm import ssm_update

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kv.state_store import Key, StateStore
from vllm_metal_lite.recurrence.base import CausalConv, GatedDelta, StateSpace
from vllm_metal_lite.recurrence.sequence_batches import (
    BatchStates,
    RowOrder,
    SequenceBatch,
    sequence_batches,
)

# (rows (B, L, ...), ..., state=(B, ...) or None) -> (rows (B, L, ...), state (B, ...))
Advance = Callable[..., tuple[mx.array, mx.array]]


class ReferenceRecurrence:
    """See StepRecurrence."""

    def __init__(self, state_store: StateStore, batch: ForwardBatch, num_rows: int) -> None:
        self.state_store, self.batch, self.num_rows = state_store, batch, num_rows

    @cached_property
    def _plan(self) -> tuple[list[SequenceBatch], RowOrder]:
        batches = sequence_batches(self.batch)
        return batches, RowOrder(batches, self.num_rows)

    def causal_conv(self, key: Key, conv: CausalConv) -> mx.array:
        channels, size, _ = conv.weight.shape

        def advance(x: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
            if state is None:
                state = mx.zeros((len(x), size - 1, channels), x.dtype)
            x = mx.concatenate([state, x], axis=1)
            return mx.conv1d(x, conv.weight, groups=channels), x[:, 1 - size :]

        y = self._scan(key, advance, conv.x)
        y = y if conv.bias is None else y + conv.bias
        return nn.silu(y) if conv.silu else y

    def gated_delta(self, key: Key, delta: GatedDelta) -> mx.array:
        d, norm = delta, delta.norm
        advance = partial(
            gated_delta_update,
            A_log=d.A_log,
            dt_bias=d.dt_bias,
            lower_bound=d.lower_bound,
            allow_neg_eigval=d.allow_neg_eigval,
        )
        q, k = (d.q, d.k) if norm is None else normalize_qk(d.q, d.k, **norm._asdict())
        return self._scan(key, advance, q, k, d.v, d.a, d.b)

    def state_space(self, key: Key, update: StateSpace) -> mx.array:
        u = update

        def advance(
            x: mx.array, b: mx.array, c: mx.array, dt: mx.array, state: mx.array | None
        ) -> tuple[mx.array, mx.array]:
            limit = u.time_step_limit
            return ssm_update(x, u.A_log, b, c, u.d, dt, u.dt_bias, state, limit)

        return self._scan(key, advance, u.x, u.b, u.c, u.dt)

    def _scan(self, key: Key, advance: Advance, *rows: mx.array) -> mx.array:
        """Run packed rows (N, 1, ...) through all batches, in order, with their states; returns
        (N, ...)."""
        rows = tuple(x.squeeze(1) for x in rows)
        batches, packed = self._plan
        states, parts = BatchStates(self.state_store), []
        for seqs in batches:
            taken = (packed.take(x, seqs) for x in rows)
            y, state = advance(*taken, state=states.get(seqs, key))
            states.set(seqs, key, state)
            parts.append(y.reshape(-1, *y.shape[2:]))
        states.commit()
        return packed.pack(parts)
