"""How many registers each kernel may store in memory, and what a text must not exceed."""

from typing import NamedTuple

# MLX's own kernels store up to 14 (qmm_t), and are known to be fast: so may each of ours.
AS_MLX = 14


class Limit(NamedTuple):
    """Cases whose names hold all words may store so many registers.  The first that fits counts."""

    words: tuple[str, ...]
    spills: int
    reason: str


LIMITS: tuple[Limit, ...] = ()


def limit_of(case: str) -> int:
    """The most registers that a case may store."""
    return next((one.spills for one in LIMITS if all(w in case for w in one.words)), AS_MLX)


def faults(case: str, dispatched: int, fitting: int, spills: int) -> list[str]:
    """What goes beyond a limit: threads of a threadgroup, stored registers."""
    found = []
    if dispatched > fitting:
        found.append(f"{dispatched} threads are dispatched, {fitting} fit")
    if spills > limit_of(case):
        found.append(f"{spills} spills, limit {limit_of(case)}")
    return found
