"""Executes Metal kernels on a CPU (see README.md in this folder)."""

from .faults import HostError, KernelFault
from .kernel import HostKernel
from .options import HostOptions
from .standin import installed
from .whole_source import run_metal

__all__ = [
    "HostError",
    "HostKernel",
    "HostOptions",
    "KernelFault",
    "installed",
    "run_metal",
]
