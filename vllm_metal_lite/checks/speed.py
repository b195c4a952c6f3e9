"""Times kernels beside their fallbacks, and copies of memory."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.check import Check, Loads, Pair, Speed, Work
from vllm_metal_lite.checks.for_model import timing_of
from vllm_metal_lite.kernels import timing
from vllm_metal_lite.kernels.registry import REGISTRY

# How often a round calls a candidate.
_CALLS = 4
# A slow candidate takes about this many seconds in all.  The check and its timing must end before
# isolated.DEADLINE.
_ENOUGH = 2.0
_LOADS = Loads()
# How many copies follow each other, so that the device stays busy.
_CHAIN = 5


def measure(check: Check, loads: Loads = _LOADS) -> Speed | None:
    """None if nothing replaces the kernel alone, or if another check times it."""
    row = REGISTRY[check.kernel]
    if not row.timed or check.beside:
        return None
    pairs = timing_of(row)(check, loads)
    found = _speed(pairs)
    # A slow kernel is timed twice, because something else may have used the device.
    return min(found, _speed(pairs), key=lambda speed: speed.ratio) if found.is_slow else found


def _speed(pairs: list[Pair]) -> Speed:
    return Speed(*np.sum([_seconds(*pair) for pair in pairs], axis=0).tolist())


def _seconds(ours: Work, other: Work) -> list[float]:
    def calls(work: Work) -> timing.Candidate:
        return lambda count: mx.eval([work() for _ in range(count)])

    candidates = calls(ours), calls(other)
    return timing.seconds_alternating(candidates, calls=_CALLS, enough=_ENOUGH, warm=_CALLS)


def copy_bandwidth(size: int = 256 << 20) -> float:
    """Bytes read plus written per second by an elementwise operation on `size` bytes."""
    x = mx.zeros(size // 4, mx.float32)
    mx.eval(x)

    def chains(count: int) -> None:
        for _ in range(count):
            y = x
            for _ in range(_CHAIN):
                y = y + 1
            mx.eval(y)

    return 2 * size * _CHAIN / timing.seconds_alternating([chains])[0]
