"""Processes ("ranks") that run shards of one model in step, over mx.distributed.

Every rank must call the same collectives in the same order.  So each decision that shapes a
forward and may differ between ranks is the leader's (`from_leader`).
"""

import json
from typing import Any, TypeVar

import numpy as np

from vllm_metal_lite.backend import mx

T = TypeVar("T")


class RankGroup:
    """The ranks of one model, and this process's place among them.

    group: the mx.distributed.Group over which mlx-lm's sharded layers reduce; None: no other ranks.
    stages: whether each rank has some of the layers, in order, and not a part of every layer.
    leader: the rank whose results count: rank 0, or the last stage, which alone has logits.
    """

    def __init__(self, group: Any = None, stages: bool = False) -> None:
        self.group, self.stages = group, stages
        self.rank: int = group.rank() if group else 0
        self.size: int = group.size() if group else 1
        self.leader = self.size - 1 if stages else 0

    @property
    def has_logits(self) -> bool:
        return not self.stages or self.rank == self.leader

    def send(self, x: mx.array) -> mx.array:
        """Send x to the next stage; evaluating the returned array sends it."""
        return mx.distributed.send(x, self.rank + 1, group=self.group)

    def receive(self, like: mx.array) -> mx.array:
        """Receive the previous stage's array.  like: an array of its shape and dtype, which is not
        read."""
        return mx.distributed.recv_like(like, self.rank - 1, group=self.group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, as JSON has them.  Waits for every rank."""
        if self.size == 1:
            return [value]
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        counts = self._gather(np.array([len(data)], np.int32)).reshape(-1)
        padded = np.zeros(max(counts), np.uint8)
        padded[: len(data)] = data
        rows = self._gather(padded).reshape(self.size, -1)
        return [json.loads(row[:n].tobytes()) for row, n in zip(rows, counts, strict=True)]

    def from_leader(self, value: T) -> T:
        """The leader's value, on every rank."""
        return self.gather(value)[self.leader]

    def from_rank_0(self, x: mx.array) -> mx.array:
        """Rank 0's integers, on every rank; nothing is evaluated.  x has one shape on all ranks."""
        if self.size == 1:
            return x
        return mx.distributed.all_sum(x if self.rank == 0 else mx.zeros_like(x), group=self.group)

    def _gather(self, data: np.ndarray) -> np.ndarray:
        return np.array(mx.distributed.all_gather(mx.array(data), group=self.group))


ALONE = RankGroup()
