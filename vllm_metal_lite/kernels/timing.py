"""Times several ways of doing the same work on this device: the answer to "is ours faster?"."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm_metal_lite.distributed import ALONE, RankGroup

# Does its work so many times, and waits for the device.
Way = Callable[[int], object]


def seconds_alternating(
    ways: Sequence[Way],
    *,
    rounds: int = 5,
    calls: int = 1,
    enough: float = math.inf,
    warm: int = 2,
    ranks: RankGroup = ALONE,
) -> list[float]:
    """Seconds per call of each way: the median of several rounds, alternately because clocks drift.

    calls: of a way in a round.  There are fewer rounds, then fewer calls, where a way would take
    more than `enough` seconds.  warm: calls before, which trace, compile and capture.  ranks: the
    leader's times count, since all ranks must make the same calls.
    """

    def seconds(way: Way, calls: int) -> float:
        start = time.perf_counter()
        way(calls)
        return ranks.first((time.perf_counter() - start) / calls)

    for way in ways:
        seconds(way, warm)
    once = max(seconds(way, 1) for way in ways)
    rounds = int(max(1, min(rounds, enough / once)))
    calls = int(max(1, min(calls, enough / once / rounds)))
    times = [[seconds(way, calls) for way in ways] for _ in range(rounds)]
    return np.median(times, axis=0).tolist()
