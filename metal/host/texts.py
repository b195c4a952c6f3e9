"""Records which Metal texts MLX would compile for the launches of a program.  No kernel runs."""

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx

from . import mlx_source


class KernelText(NamedTuple):
    """One text that MLX hands to Metal's compiler, without its prelude.

    kernel: the name of the custom kernel.  text: as `mlx_source.generated_source` gives it.
    threads: the threads of a threadgroup.
    """

    kernel: str
    text: str
    threads: int


class _Input(NamedTuple):
    """The properties of an input that the text depends on."""

    dtype: mx.Dtype
    ndim: int
    size: int  # capped: MLX asks only whether it is SMALL


class _Launch(NamedTuple):
    definition: tuple
    inputs: tuple[_Input, ...]
    template: tuple
    output_dtypes: tuple[mx.Dtype, ...]
    threads: int


class Recording:
    """The launches under `recorded`."""

    def __init__(self) -> None:
        self._launches: dict[str, tuple[_Launch, mx.array]] = {}
        self._numbers = count()

    def texts(self, *results: mx.array) -> list[KernelText]:
        """The distinct texts of the launches so far, in order; then forgets these launches.

        results: only launches that these arrays depend on count.  MLX runs no others.
        """
        names: Iterable[str] = self._launches
        if results:
            dot = io.StringIO()
            leaves = {name: leaf for name, (_, leaf) in self._launches.items()}
            mx.export_to_dot(dot, *results, **leaves)
            used = set(re.findall(r'"([^"]+)" ->', dot.getvalue()))
            names = [name for name in self._launches if name in used]
        launches = dict.fromkeys(self._launches[name][0] for name in names)
        self._launches.clear()
        return list(dict.fromkeys(map(_text, launches)))

    def _launch(self, definition: tuple, call: dict[str, Any]) -> list[mx.array]:
        inputs = call["inputs"]
        launch = _Launch(
            definition,
            tuple(_Input(a.dtype, a.ndim, min(a.size, mlx_source.SMALL)) for a in inputs),
            tuple(call.get("template") or ()),
            tuple(call["output_dtypes"]),
            math.prod(call["threadgroup"]),
        )
        shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
        outputs = [mx.zeros(shape, dtype) for shape, dtype in shapes]
        # Evaluated, it is a leaf of the graph, which `texts` finds by its name.
        leaf = mx.zeros(1)
        mx.eval(leaf)
        self._launches[f"launch {next(self._numbers)}"] = launch, leaf
        return mx.depends(outputs, [*inputs, leaf])


@contextmanager
def recorded() -> Iterator[Recording]:
    """While in force, kernels of `mx.fast.metal_kernel` are noted and give zeros."""
    recording = Recording()

    def metal_kernel(
        name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, **how: Any
    ) -> Any:
        definition = (
            ("name", name),
            ("input_names", tuple(input_names)),
            ("output_names", tuple(output_names)),
            ("source", source),
            *sorted(how.items()),
        )
        return lambda **call: recording._launch(definition, call)

    with patch.object(mx.fast, "metal_kernel", metal_kernel):
        yield recording


@cache
def _text(launch: _Launch) -> KernelText:
    definition = dict(launch.definition)
    text = mlx_source.generated_source(
        definition, launch.inputs, launch.template, launch.output_dtypes
    )
    return KernelText(definition["name"], text, launch.threads)
