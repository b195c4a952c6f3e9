"""Threads as the ranks of a model: stages that gather from each other and send nothing.

A rank that waits 20 seconds for the others fails.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from vllm_metal_lite.distributed import RankGroup


class _Rank(RankGroup):
    def __init__(self, rank: int, values: list, barrier: Barrier) -> None:
        super().__init__(stages=True)
        self.rank, self.size, self.leader = rank, len(values), len(values) - 1
        self._values, self._barrier = values, barrier

    def gather(self, value):
        self._values[self.rank] = json.dumps(value)
        self._barrier.wait(20)
        values = [json.loads(v) for v in self._values]
        self._barrier.wait(20)
        return values


def run(task: Callable[[RankGroup], Any], size: int = 2) -> list[Any]:
    """Run the task on each rank; return their results.  A rank that ends releases no other."""
    values, barrier = [None] * size, Barrier(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: task(_Rank(rank, values, barrier)), range(size)))
