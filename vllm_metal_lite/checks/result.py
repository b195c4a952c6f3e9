"""The result of checking one kernel."""

import math
from dataclasses import dataclass

from vllm_metal_lite.checks.check import Check

# A kernel is replaced if its fallback takes less than 1 / _SLOWER of its time.  Medians of short
# launches differ by up to a third between two runs; below this factor a change gains little.
_SLOWER = 1.5
# Seconds by which the host may take longer to launch a kernel than an MLX operation.  Compiled
# steps do not take this time.
_LAUNCH = 30e-6


@dataclass(frozen=True)
class Speed:
    """Seconds of a kernel and of its fallback, for the same work."""

    seconds: float
    fallback_seconds: float

    @property
    def ratio(self) -> float:
        """Above 1: the fallback is faster."""
        return self.seconds / self.fallback_seconds

    @property
    def is_slow(self) -> bool:
        return self.seconds - _LAUNCH > _SLOWER * self.fallback_seconds

    def __str__(self) -> str:
        times = (f"{1e6 * seconds:,.0f} us" for seconds in (self.seconds, self.fallback_seconds))
        return "takes {} where its fallback takes {}".format(*times)


@dataclass(frozen=True)
class CheckResult:
    """The largest error, as a share of the allowed one, or why the kernel did not run, in one line.

    ended: the kernel hung, or ended the process.  speed: None if nothing was timed.
    timing_failed: the kernel is correct, but its timing raised.
    """

    check: Check
    error: float = math.inf
    failure: str | None = None
    ended: bool = False
    speed: Speed | None = None
    timing_failed: bool = False

    @property
    def kernel(self) -> str:
        return self.check.kernel

    @property
    def passed(self) -> bool:
        """Whether the kernel is correct, fast or slow."""
        return self.failure is None and self.error <= 1

    def __str__(self) -> str:
        if self.failure is not None:
            return f"{self.check}: {self.failure}"
        return f"{self.check}: the error is {self.error:.2g} times the allowed one"
