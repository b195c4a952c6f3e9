"""Puts the CPU host (metal/host) in place of a GPU, for tools that run without one."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from unittest.mock import patch

from vllm_metal_lite import backend


@contextmanager
def on_host() -> Iterator[None]:
    """The host runs the kernels, and the engine treats the CPU as a GPU."""
    with (
        import_module("metal.host").installed(),
        patch.object(backend, "is_cpu", lambda: False),
        patch.object(backend, "memory_limit", lambda: 4 << 30),
    ):
        yield
