"""What the fused forward that is being built may use."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from vllm_metal_lite.attention.base import Step

NO_ROWS = range(0)


@dataclass(frozen=True)
class FusedKernels:
    """The kernels that fused launches use.

    skinny_rows: the row counts that use `skinny_gemm`.
    expert_rows: the row counts that use `expert_gemm` and its neighbours.
    unused: kernels that failed, or for which the model has no work.
    """

    skinny_rows: range = NO_ROWS
    expert_rows: range = NO_ROWS
    unused: frozenset[str] = frozenset()


class Current(NamedTuple):
    """step: of the forward; None: no forward is being built."""

    step: Step | None = None
    kernels: FusedKernels = FusedKernels()


_current: ContextVar[Current] = ContextVar("current", default=Current())  # noqa: B039
current = _current.get


@contextmanager
def fusing(step: Step | None, kernels: FusedKernels) -> Iterator[None]:
    """Held while a fused forward is built."""
    before = _current.set(Current(step, kernels))
    try:
        yield
    finally:
        _current.reset(before)
