"""The time that `doctor` may take, and the order in which it uses that time."""

from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic

from vllm_metal_lite.checks.check import Check

# The share of the time after which no further check begins; the rest is for speed, order, answers.
CHECKS_SHARE = 0.6


class Budget:
    """Seconds from here on; None: no limit.  clock: gives seconds, and never goes back."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._clock, self._start = seconds, clock, clock()

    def is_used(self, share: float = 1.0) -> bool:
        """Whether this share of the time is over."""
        if self._seconds is None:
            return False
        return self._clock() - self._start >= share * self._seconds


def in_rounds(checks: Sequence[Check], before: Sequence[Check] = ()) -> list[Check]:
    """Each kernel once, then each kernel a second time, and so on; those before count.

    The order within a round is kept, so a check still follows those that it needs.
    """
    seen = Counter(check.kernel for check in before)
    rounds = []
    for check in checks:
        rounds.append(seen[check.kernel])
        seen[check.kernel] += 1
    return [check for _, check in sorted(zip(rounds, checks, strict=True), key=lambda p: p[0])]
