"""Runs kernels of whole Metal sources, such as MLX's own."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from . import memory, toolchain
from .launch import buffer_of, load
from .options import HostOptions
from .translate import Parameter, expand_includes, translate


def run_metal(
    source: str,
    function: str,
    buffers: Mapping[int, object] | Sequence[object],
    grid_threads: Sequence[int],
    threads_per_threadgroup: Sequence[int],
    *,
    constants: Mapping[int, object] | None = None,
    threadgroup_memory: Mapping[int, int] | None = None,
    include_dirs: Sequence[Path] = (),
    outputs: Sequence[int] | None = None,
    options: HostOptions | None = None,
    name: str = "source.metal",
) -> None:
    """Run one kernel of a Metal source on buffers in place.

    source: a whole Metal source; quoted includes are looked up in `include_dirs`.  name: what
    messages call it.
    function: the kernel, with template arguments if it has any: "softmax_single_row<float>".
    buffers: of [[buffer(i)]], by index or in order: a C-contiguous numpy or MLX
    array, used where it lies; a numpy scalar, or bytes; None for a buffer that is absent.
    grid_threads: the size of the grid in threads: threadgroups times threads_per_threadgroup.
    constants: numpy scalars (np.bool_, np.int32 ...) by [[function_constant(i)]].
    threadgroup_memory: bytes by [[threadgroup(i)]].
    outputs: the buffers that the kernel has to fill: checked, nothing else may be written, and
    reading them before is a fault.  By default any array may be written, and none must be.

    Raises HostError if the host cannot compile or run the kernel; KernelFault if the kernel did
    what no kernel may do; TypeError or ValueError if a buffer is none of the above.
    """
    options = options or HostOptions()
    unit, parameters = _translated(source, function, tuple(include_dirs), name)
    library = load(unit, function, toolchain.flavour(options))
    given = dict(buffers.items() if isinstance(buffers, Mapping) else enumerate(buffers))
    bound = {}
    for parameter in parameters:
        if parameter.attribute != "buffer":
            continue
        data = _elements(given.get(parameter.index), parameter)
        array = isinstance(given.get(parameter.index), (np.ndarray, mx.array))
        output = outputs is not None and parameter.index in outputs
        bound[parameter.index] = buffer_of(
            parameter.name,
            data,
            writable=array and (outputs is None or output),
            initialised=not output,
        )
    library.run(
        grid_threads,
        threads_per_threadgroup,
        bound,
        options,
        threadgroup_memory,
        {index: np.asarray(value).tobytes() for index, value in (constants or {}).items()},
    )


def _elements(value: object, parameter: Parameter) -> np.ndarray:
    if value is None:
        return np.empty(0, np.uint8)
    if isinstance(value, mx.array):
        value = memory.elements(value)
    elif isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8).copy()
    elif not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(
            f"buffer {parameter.index} ({parameter.name}) is a {type(value).__name__}: "
            "give an array, a numpy scalar or bytes, so that its type is known"
        )
    value = np.asarray(value)
    if not value.flags.c_contiguous:
        raise ValueError(f"buffer {parameter.index} ({parameter.name}) is not C-contiguous")
    return value


@functools.cache
def _translated(
    source: str, function: str, include_dirs: tuple[Path, ...], name: str
) -> tuple[toolchain.Unit, list[Parameter]]:
    return translate(expand_includes(source, name, include_dirs), function)
