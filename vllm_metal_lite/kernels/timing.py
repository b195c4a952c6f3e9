"""Times candidates for the same work on this device."""

import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import one_line, our_fault
from vllm_metal_lite.kernels.findings import Findings
from vllm_metal_lite.kernels.launch import is_of_device

logger = logging.getLogger(__name__)

# A function that does its work a given number of times, and waits for the device.
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

    The candidates alternate, because clocks drift.  calls: how often a round calls a candidate.
    There are fewer rounds, then fewer calls, if a candidate would take more than `enough` seconds.
    warm: the number of untimed calls before, which trace and compile.  ranks: all ranks make the
    same calls, and take the leader's times.  An error of one rank is raised on all.
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


def timed_once(
    key: str, kernel: str, what: str, measure: Callable[[], str], ranks: RankGroup = ALONE
) -> str | None:
    """The finding of `measure`, which runs once a machine; None, with a message, on failure.

    what: the name of the work in messages.  kernel: the kernel that is not used after a failure.
    ranks: all take the finding that the leader remembers; `measure` fails on all or on none.
    """
    found = Findings()
    known = ranks.from_leader(found.known.get(key))
    if known is None:
        logger.info(f"timing {what}, once on this machine", extra={"transient": True})
        try:
            known = measure()
        except Exception as e:
            if is_of_device(e):  # the next start may succeed
                logger.warning(f"{kernel} is not used: {what} cannot be timed: {one_line(e)}")
            else:
                logger.exception(f"{kernel} is not used: timing {what}: {our_fault(e)}")
            return None
        found.add(key, known)
    return known
