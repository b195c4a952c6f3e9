"""What the fused forward that is being built may use."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from vllm_metal_lite.attention.base import Step
from vllm_metal_lite.backend import mx


class Current(NamedTuple):
    """step: of the forward; None: no forward is being built.  The others: see FusedLaunches."""

    step: Step | None = None
    skinny_rows: range = range(0)
    expert_rows: range = range(0)
    unused: frozenset[str] = frozenset()

    @property
    def num_live(self) -> mx.array | None:
        """See `expert_mlp`."""
        return None if self.step is None else self.step.num_live


_current: ContextVar[Current] = ContextVar("current", default=Current())  # noqa: B039
current = _current.get


@contextmanager
def fusing(current: Current) -> Iterator[None]:
    """Held while a fused forward is built."""
    before = _current.set(current)
    try:
        yield
    finally:
        _current.reset(before)
