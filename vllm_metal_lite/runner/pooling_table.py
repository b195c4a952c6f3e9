"""Pooling requests: prompts that give their hidden states and draw no token.

A step pools in three places: `extend` names the rows before the step, `pooled_sums` sums their
hidden states on the device, and `take` makes the embeddings when the step has ended.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch, PooledRows
from vllm_metal_lite.pooling_params import PoolingParams

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Pooling:
    """A pooling request.

    sum: the sum of the hidden states of its rows so far.  A preempted prompt starts again.
    """

    params: PoolingParams
    num_prompt_tokens: int
    sum: np.ndarray | None = None


class PoolingTable:
    """The unfinished pooling requests, by a key of the caller's choice."""

    def __init__(self) -> None:
        self._poolings: dict[Hashable, _Pooling] = {}

    def add(self, key: Hashable, params: PoolingParams, num_prompt_tokens: int) -> None:
        self._poolings[key] = _Pooling(params, num_prompt_tokens)

    def remove(self, key: Hashable) -> None:
        self._poolings.pop(key, None)

    def extend(self, batch: ForwardBatch, keys: Sequence[Hashable]) -> ForwardBatch:
        """Add the rows that pooling requests read to a step's batch.  keys: one per segment."""
        if not self._poolings:
            return batch
        terminal = set(batch.sample_segments.tolist())
        segments, ranges, num_sampled = [], [], len(terminal)
        for i, (start, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
            if (pooling := self._poolings.get(keys[i])) is None:
                continue
            num_sampled -= i in terminal
            is_mean = pooling.params.pooling == "mean"
            if is_mean or i in terminal:
                segments.append(i)
                ranges.append((start if is_mean else end - 1, end))
        if not segments:
            return batch
        rows = PooledRows(np.array(segments, np.int32), np.array(ranges, np.int32), not num_sampled)
        return replace(batch, pooled=rows)

    def take(
        self, batch: ForwardBatch, keys: Sequence[Key], sums: np.ndarray | None
    ) -> Iterator[tuple[Key, np.ndarray]]:
        """Yield the embedding of each request whose prompt ends with a completed step.

        sums: `StepResult.pooled`.  Requests that were removed while the step ran are left out.
        """
        if batch.pooled is None or sums is None:
            return
        for i, value in zip(batch.pooled.segments.tolist(), sums, strict=True):
            if (pooling := self._poolings.get(keys[i])) is None:
                continue
            is_mean, count = pooling.params.pooling == "mean", pooling.num_prompt_tokens
            if is_mean and pooling.sum is not None and batch.positions[batch.cu_seqlens_q[i]] > 0:
                value = value + pooling.sum
            pooling.sum = value
            if batch.seq_lens[i] == count:
                yield keys[i], _embedding(value / count if is_mean else value, pooling.params)


def pooled_sums(rows: PooledRows, hidden: mx.array) -> mx.array:
    """Sum the ranges of rows: (Q, hidden_size) float32.

    hidden: (N, 1, hidden_size), the hidden states that the model's head sees.  N may include
    padding.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    first, end = rows.ranges[:, 0], rows.ranges[:, 1]
    if (end - first == 1).all():
        return hidden[mx.array(first)].astype(mx.float32)
    parts = [hidden[a:b].astype(mx.float32).sum(axis=0) for a, b in rows.ranges.tolist()]
    return mx.stack(parts)


def _embedding(hidden: np.ndarray, params: PoolingParams) -> np.ndarray:
    hidden = hidden[: params.dimensions]
    if not params.normalize:
        return hidden
    return hidden / max(math.sqrt(hidden @ hidden), 1e-12)
