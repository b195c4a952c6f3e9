"""HostKernel: `mx.fast.metal_kernel`, executed on the CPU."""

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from . import memory, mlx_source, origin, toolchain
from .launch import Library, buffer_of, load
from .options import HostOptions
from .translate import Parameter, expand_includes, translate


class HostKernel:
    """A custom Metal kernel that runs on the CPU, called as MLX's own are.

    The source that is executed is the one MLX generates. Inputs are read where they lie: a kernel
    that writes into the memory of an input changes the array that was passed.

    name to ensure_row_contiguous: as for `mx.fast.metal_kernel`.  A call raises HostError if the
    host cannot compile or run the kernel, and KernelFault if the kernel does what no kernel may.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        *,
        options: HostOptions | None = None,
    ):
        self.definition = {
            "name": name,
            "input_names": list(input_names),
            "output_names": list(output_names),
            "source": source,
            "header": header,
            "ensure_row_contiguous": ensure_row_contiguous,
        }
        self.name = name
        self.options = options or HostOptions()
        self._builds: dict[tuple, tuple[Library, list[Parameter]]] = {}

    def __call__(
        self,
        *,
        inputs: Sequence,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream=None,
        options: HostOptions | None = None,
    ) -> list[mx.array]:
        """Run the kernel -> its outputs, evaluated.

        inputs: arrays (MLX or numpy) or scalars.  options: for this call only.  The rest as for a
        kernel of `mx.fast.metal_kernel`; `verbose` and `stream` are ignored.
        """
        options = options or self.options
        arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        mx.eval(arrays)
        if self.definition["ensure_row_contiguous"]:
            arrays = [memory.row_contiguous(a) for a in arrays]
            mx.eval(arrays)
        outputs = [
            memory.new_output(tuple(shape), dtype, init_value)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        library, parameters = self._build(arrays, template or (), output_dtypes, options)
        buffers = self._buffers(parameters, arrays, outputs, init_value, options)
        library.run(grid, threadgroup, buffers, options)
        return outputs

    def _buffers(self, parameters, arrays, outputs, init_value, options):
        """Index of a buffer parameter -> its buffer."""
        named = dict(zip(self.definition["input_names"], arrays, strict=True))
        results = dict(zip(self.definition["output_names"], outputs, strict=True))
        buffers = {}
        for parameter in parameters:
            if parameter.attribute != "buffer":
                continue
            name = parameter.name
            stem, _, suffix = name.rpartition("_")
            if name in results:
                data = memory.elements(results[name])
                settings = {"writable": True, "initialised": init_value is not None}
            elif name in named:
                data = memory.elements(named[name])
                settings = {"writable": name in options.writable_inputs}
                settings["misaligned"] = memory.misalignment(named[name])
            else:
                data, settings = _layout(memory.elements(named[stem]), suffix), {}
            buffers[parameter.index] = buffer_of(name, data, **settings)
        return buffers

    def _build(self, arrays, template, output_dtypes, options):
        key = (
            tuple((a.dtype, a.ndim, a.size < mlx_source.SMALL) for a in arrays),
            tuple(template),
            tuple(output_dtypes),
            toolchain.flavour(options),
        )
        if key not in self._builds:
            text = mlx_source.generated_source(self.definition, arrays, template, output_dtypes)
            self._builds[key] = self._compile(text, options)
        return self._builds[key]

    def _compile(self, text: str, options: HostOptions) -> tuple[Library, list[Parameter]]:
        function = mlx_source.instantiation(text)
        text = origin.mark_lines(text, self.definition)
        text = expand_includes(text, self.name, [])
        unit, parameters = translate(text, function, _prelude())
        return load(unit, self.name, toolchain.flavour(options)), parameters


@functools.cache
def _prelude() -> str:
    return expand_includes(mlx_source.PRELUDE, "prelude", [mlx_source.INCLUDE])


def _layout(data: np.ndarray, what: str) -> np.ndarray:
    """The argument `x_shape`, `x_strides` or `x_ndim` of an input x."""
    if what == "shape":
        return np.array(data.shape, np.int32)
    if what == "strides":
        return np.array([s // data.itemsize for s in data.strides], np.int64)
    return np.array(data.ndim, np.int32)
