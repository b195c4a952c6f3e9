"""A kernel of a few lines on the CPU host."""

from typing import Any

from metal.host import HostKernel
from vllm_metal_lite.backend import mx


def launch(
    source: str,
    inputs: list[mx.array],
    out: tuple[tuple[int, ...], mx.Dtype],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    template: Any = None,
    options: Any = None,
    init_value: float | None = None,
    **how: Any,
) -> mx.array:
    """Runs a kernel with inputs a, b, c ... and one output: (shape, dtype).  how: of HostKernel."""
    names = {"input_names": list("abcd"[: len(inputs)]), "output_names": ["out"]}
    kernel = HostKernel(**{"name": "test", **names, "source": source, **how})
    return kernel(
        inputs=inputs,
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[out[0]],
        output_dtypes=[out[1]],
        init_value=init_value,
        options=options,
    )[0]
