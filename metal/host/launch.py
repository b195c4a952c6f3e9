"""Loads the library of a kernel and runs dispatches of it."""

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from . import coverage, toolchain
from .faults import HostError, KernelFault
from .lines import line_at
from .options import FORWARD, REVERSE, HostOptions

MAX_BUFFERS = 64
MAX_THREADS = 1024


class Buffer(ctypes.Structure):
    """Memory that a kernel is given, as in cpu/launch.h; see `buffer_of`."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
        ("element", ctypes.c_uint32),
        ("misaligned", ctypes.c_uint32),
    ]


def buffer_of(
    name: str,
    data: np.ndarray,
    *,
    writable: bool = False,
    initialised: bool = True,
    misaligned: int = 0,
) -> Buffer:
    """The memory of `data`, which lives as long as the buffer, and what may be done with it.

    initialised: it may be read; if not, the kernel must write all of it.  misaligned: bytes past a
    boundary of 16 at which it would lie on a GPU.  All but the address matters to the checker only.
    """
    size, item, permits = data.nbytes, data.itemsize, (writable, initialised)
    buffer = Buffer(data.ctypes.data, size, name.encode(), *permits, item, misaligned)
    buffer.data = data
    return buffer


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("schedule", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("num_buffers", ctypes.c_uint32),
        ("num_shared", ctypes.c_uint32),
        ("buffers", Buffer * MAX_BUFFERS),
        ("shared_bytes", ctypes.c_uint32 * MAX_BUFFERS),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 512),
        ("file", ctypes.c_char * 512),
        ("line", ctypes.c_uint32),
        ("has_thread", ctypes.c_uint32),
        ("group", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("code", ctypes.c_uint32),
        ("earlier_code", ctypes.c_uint32),
    ]


class Library:
    """The compiled form of one kernel."""

    def __init__(self, path: Path, kernel: str):
        self.kernel = kernel
        self.path = path
        self._library = ctypes.CDLL(str(path))
        if path.with_suffix(".cpp").exists():  # compiled with counters of its lines
            self._library.metal_host_image.restype = ctypes.c_uint64
            coverage.watch(path, self._library.metal_host_image())
        self._lock = threading.Lock()  # a library has one set of fibers

    def _set_constants(self, constants: Mapping[int, bytes]) -> None:
        self._library.metal_host_unset_constants()
        for index, value in constants.items():
            self._library.metal_host_constant(ctypes.c_uint(index), ctypes.c_char_p(value))

    def run(
        self,
        grid: Sequence[int],
        threads: Sequence[int],
        buffers: Mapping[int, Buffer],
        options: HostOptions,
        shared_bytes: Mapping[int, int] | None = None,
        constants: Mapping[int, bytes] | None = None,
    ) -> None:
        """Run the kernel over a grid of threads; threadgroups at the grid's edge are smaller.

        buffers: by index.  shared_bytes: the size of each `[[threadgroup(i)]]` argument.
        constants: the bytes of each function constant.  Raises KernelFault if the kernel did what
        no kernel may do, and HostError if the host cannot run it.
        """
        threads = [min(t, g) for t, g in zip(threads, grid, strict=True)]
        total = threads[0] * threads[1] * threads[2]
        if not 0 < total <= MAX_THREADS or min(grid) < 1:
            raise HostError(
                f"kernel {self.kernel}: grid {tuple(grid)} in threadgroups of {tuple(threads)}: "
                f"every size is at least 1, and a threadgroup has at most {MAX_THREADS} threads"
            )
        launch, fault = _Launch(), _Fault()
        launch.grid[:], launch.threads[:] = grid, threads
        random = not isinstance(options.schedule, str)
        launch.schedule = 2 if random else [FORWARD, REVERSE].index(options.schedule)
        launch.seed = options.schedule if random else 0
        launch.num_buffers = max(buffers, default=-1) + 1
        for index, buffer in buffers.items():
            launch.buffers[index] = buffer
        for index, size in (shared_bytes or {}).items():
            launch.shared_bytes[index] = size
        launch.num_shared = max(shared_bytes or {}, default=-1) + 1
        with self._lock:
            self._set_constants(constants or {})
            failed = self._library.metal_host_launch(ctypes.byref(launch), ctypes.byref(fault))
        if failed:
            raise self._fault(fault)

    def _fault(self, fault: _Fault) -> HostError | KernelFault:
        kind, message = fault.kind.decode(), fault.message.decode()
        if kind == "host":
            return HostError(f"kernel {self.kernel}: {message}")
        location = f"{fault.file.decode()}:{fault.line}" if fault.line else ""
        if fault.code:  # the return address of a call: it lies behind the call
            location = line_at(self.path, fault.code - 1)
        if fault.earlier_code:
            location += f", the other at {line_at(self.path, fault.earlier_code - 1)}"
        positions = (tuple(fault.group), tuple(fault.thread)) if fault.has_thread else (None, None)
        return KernelFault(kind, self.kernel, message, location, *positions)


@functools.cache
def load(unit: toolchain.Unit, kernel: str, flavour: toolchain.Flavour) -> Library:
    """The library of a translated kernel, compiled if need be."""
    return Library(toolchain.build(unit, kernel, flavour), kernel)
