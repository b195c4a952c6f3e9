"""Replaces `mx.fast.metal_kernel` by HostKernel, so that code for a Mac runs as it is."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import mlx.core as mx

from .kernel import HostKernel
from .options import HostOptions


@contextlib.contextmanager
def installed(**settings) -> Iterator[list[HostKernel]]:
    """While in force, `mx.fast.metal_kernel` makes kernels that run on the CPU.

    `mx.compile` is off meanwhile, since a host kernel needs values, not tracers. Kernels made
    before or after are not touched: code that keeps kernels must make them under this.  Yields the
    kernels that were made, in order.  settings: fields of `HostOptions`.
    """
    options = HostOptions(**settings)
    made: list[HostKernel] = []

    def metal_kernel(*args, **kwargs) -> HostKernel:
        made.append(HostKernel(*args, **kwargs, options=options))
        return made[-1]

    with patch.object(mx.fast, "metal_kernel", metal_kernel):
        mx.disable_compile()
        try:
            yield made
        finally:
            mx.enable_compile()
