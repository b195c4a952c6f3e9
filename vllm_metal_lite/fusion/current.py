"""What the fused forward that is being built may use."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from vllm_metal_lite.backend import mx


class Current(NamedTuple):
    """skinny_rows: the row counts that use `skinny_gemm`; None: linear layers are MLX's own.
    expert_rows: those that use `expert_gemm` and its neighbours.  num_live: see `expert_mlp`.
    """

    skinny_rows: range | None = None
    expert_rows: range = range(0)
    num_live: mx.array | None = None


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
