"""Launches of the kernels of metal/, and numbers and checks for their arguments."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import one_line, our_fault
from vllm_metal_lite.kernels import registry, source

Template = dict[str, int | mx.Dtype]
# The shape and the type of an output.
Output = tuple[tuple[int, ...], mx.Dtype]

# MLX passes shorter arrays to a kernel in another address space, for which the kernel would have to
# be compiled again.  So arrays whose length varies have at least this many elements.
MIN_ELEMENTS = 8

_one_by_one: ContextVar[bool] = ContextVar("one_by_one", default=False)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n, for n >= 1."""
    return 1 << (n - 1).bit_length()


@cache
def bits(x: float) -> int:
    """The bits of a float32: a template value must be an integer, and not negative, because MLX
    before 0.32.4 puts its sign in the kernel's name."""
    if x < 0:
        raise ValueError(f"a kernel's template value must be at least 0, not {x:g}")
    return int(np.float32(abs(x)).view(np.int32))


def grid_for(count: int) -> tuple[int, int]:
    """The threads of a threadgroup (a multiple of 32, at most 256) and the number of threadgroups
    that together have at least `count` threads."""
    threads = min(256, -(-count // 32) * 32)
    return threads, -(-count // threads)


def check_array(
    name: str, array: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype | None = None
) -> None:
    """Raise ValueError unless an array, if given, has this shape, and this type, if given.

    A kernel would read or write outside of another array, without an error.
    """
    if array is None:
        return
    if array.shape != shape or (dtype is not None and array.dtype != dtype):
        wanted = shape if dtype is None else f"{shape} {dtype}"
        raise ValueError(f"{name} must be {wanted}, not {array.shape} {array.dtype}")


def is_of_device(error: Exception) -> bool:
    """Whether a compiler, a driver or the device raised an error.  Any other error is a fault of
    this package, and says nothing about a kernel."""
    if isinstance(error, ValueError):  # MLX's for a pipeline that allows fewer threads
        return str(error).startswith("Thread group size")
    return isinstance(error, (RuntimeError, MemoryError, OSError))


class KernelError(RuntimeError):
    """A launch failed.  kernel: its name in the registry.  why: the error in one line."""

    def __init__(self, kernel: str, error: Exception) -> None:
        self.kernel, self.why = kernel, one_line(error)
        super().__init__(f"{kernel}: {self.why}")


@contextmanager
def one_by_one() -> Iterator[None]:
    """While held, each launch is evaluated by itself, and raises KernelError if it fails.

    MLX compiles a kernel when the graph of a whole step is evaluated, and its errors may not name
    the kernel.
    """
    before = _one_by_one.set(True)
    try:
        yield
    finally:
        _one_by_one.reset(before)


@cache
def placeholder() -> mx.array:
    zeros = mx.zeros(MIN_ELEMENTS)
    mx.eval(zeros)  # otherwise every compiled step would make its own
    return zeros


class Kernel:
    """One kernel.  MLX compiles it once per set of template values, at the first launch.

    inputs, outputs: the names of the arrays in metal/NAME.metal.
    """

    def __init__(self, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.name, self.inputs, self.outputs = name, list(inputs), list(outputs)
        self._launchers: dict[Any, Any] = {}

    def _launcher(self) -> Any:
        # Keyed by the factory, because tests replace mx.fast.metal_kernel.
        make = mx.fast.metal_kernel
        if make not in self._launchers:
            header, body = source.read(self.name)
            self._launchers[make] = make(
                name=f"metal_lite_{self.name}",
                input_names=self.inputs,
                output_names=self.outputs,
                source=body,
                header=header,
            )
        return self._launchers[make]

    def __call__(
        self,
        arrays: Sequence[mx.array | None],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: int,
        outputs: Sequence[Output],
    ) -> list[mx.array]:
        """Launch over grid threadgroups of `threadgroup` threads; returns the outputs.

        arrays: in the order of `inputs`, row-contiguous (MLX copies others, which is ruinous for a
        store); None: an input that the template disables.  outputs: in the order of the names.
        """
        arrays = [placeholder() if array is None else array for array in arrays]
        one_by_one = _one_by_one.get()
        if one_by_one:
            mx.eval(arrays)  # an error here is not this kernel's
        try:
            results = self._launcher()(
                inputs=arrays,
                template=list(template.items()),
                grid=(grid[0] * threadgroup, grid[1], grid[2]),
                threadgroup=(threadgroup, 1, 1),
                output_shapes=[shape for shape, _ in outputs],
                output_dtypes=[dtype for _, dtype in outputs],
            )
            if one_by_one:
                mx.eval(results)
        except Exception as e:
            if not one_by_one:
                raise
            error = e if is_of_device(e) else RuntimeError(our_fault(e))
            raise KernelError(registry.name_of_launch(self.name, template), error) from e
        return results
