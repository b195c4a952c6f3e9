"""Times candidates for the same work on this device."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import one_line

# Does its work the given number of times, and waits for the device.
Candidate = Callable[[int], object]


def seconds_alternating(
    candidates: Sequence[Candidate],
    *,
    rounds: int = 5,
    calls: int = 1,
    enough: float = math.inf,
    warm: int = 2,
    ranks: RankGroup = ALONE,
) -> list[float]:
    """Seconds per call of each candidate: the median of several rounds.

    The candidates alternate, because clocks drift.  calls: a candidate's in a round.  There are
    fewer rounds, then fewer calls, if a candidate would take more than `enough` seconds.  warm:
    calls before, which trace, compile and capture.  ranks: the leader's times count: all ranks
    must make the same calls.  So an error of one rank is raised on all.
    """

    def seconds(candidate: Candidate, calls: int) -> float:
        error: Exception | None = None
        start = time.perf_counter()
        try:
            candidate(calls)
        except Exception as e:
            error = e
        own = (time.perf_counter() - start) / calls
        found = ranks.gather((own, error and one_line(error)))
        for why in filter(None, (problem for _, problem in found)):
            raise error or RuntimeError(why)
        return found[ranks.leader][0]

    for candidate in candidates:
        seconds(candidate, warm)
    once = max(seconds(candidate, 1) for candidate in candidates)
    rounds = int(max(1, min(rounds, enough / once)))
    calls = int(max(1, min(calls, enough / once / rounds)))
    times = [[seconds(candidate, calls) for candidate in candidates] for _ in range(rounds)]
    return np.median(times, axis=0).tolist()
