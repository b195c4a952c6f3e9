"""The step and the kernels of the fused forward that is being built."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from vllm_metal_lite.attention.base import DeviceBatch

NO_ROWS = range(0)


@dataclass(frozen=True)
class FusedKernels:
    """The kernels that fused launches use.

    skinny_rows: the row counts whose products use `skinny_gemm`.
    expert_rows: the row counts whose mixtures use the kernels of experts.
    unused: kernels that failed, or for which the model has no work.
    """

    skinny_rows: range = NO_ROWS
    expert_rows: range = NO_ROWS
    unused: frozenset[str] = frozenset()


class FusionContext(NamedTuple):
    """step: the step of the forward that is built, or None.  kernels: the kernels of that
    forward."""

    step: DeviceBatch | None = None
    kernels: FusedKernels = FusedKernels()


_context: ContextVar[FusionContext] = ContextVar("fusion", default=FusionContext())  # noqa: B039
fusion_context = _context.get


@contextmanager
def fusing(step: DeviceBatch | None, kernels: FusedKernels) -> Iterator[None]:
    """Set the context while a fused forward is built."""
    before = _context.set(FusionContext(step, kernels))
    try:
        yield
    finally:
        _context.reset(before)
