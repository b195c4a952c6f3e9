"""Running foreign kernels: with all options of the host, and compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from metal.host import HostOptions, run_metal
from tests.support.host.foreign_kernels import INCLUDE, metal
from tests.support.kernels.arrays import floats, seeded

DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat16_t": mx.bfloat16}
# (atol, rtol) of values around 1.
TOLERANCES = {"float": (2e-6, 2e-6), "half": (1e-3, 1e-3), "bfloat16_t": (8e-3, 8e-3)}
PLAIN = (HostOptions(), HostOptions(schedule="reverse"))
CHECKED = (HostOptions(checked=True, schedule=7), HostOptions(checked=True, schedule="reverse"))


def random(shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[mx.array, np.ndarray]:
    """Normal values that `dtype` can hold, as an MLX array and in float64."""
    array = seeded(*shape, seed=seed, dtype=DTYPES[dtype])
    return array, floats(array)


def check_close(array: mx.array, expected: np.ndarray, dtype: str) -> None:
    atol, rtol = TOLERANCES[dtype]
    np.testing.assert_allclose(floats(array), expected, atol=atol, rtol=rtol)


def with_all_options(
    run: Callable[[HostOptions], list[mx.array]], *, checked: bool = True
) -> list[mx.array]:
    """The outputs of `run`, which must be the same to the bit with all options.

    `checked`: also under the checker, for which the kernel is compiled once more.
    """
    first = None
    for options in PLAIN + CHECKED if checked else PLAIN:
        outputs = run(options)
        bits = [bytes(memoryview(array.view(mx.uint8))) for array in outputs]
        first = first or bits
        assert bits == first, f"another result with {options}"
    return outputs


@dataclass(frozen=True)
class Dispatch:
    """A call of one of MLX's kernels.

    `buffers`: as for `run_metal`, but an output is given as (shape, dtype).  `groups`: how many
    threadgroups, each of `threads`.
    """

    source: str
    function: str
    buffers: Sequence[Any]
    groups: Sequence[int]
    threads: Sequence[int]
    constants: Mapping[int, np.generic] = field(default_factory=dict)

    def run(self, options: HostOptions) -> list[mx.array]:
        """The outputs of one run."""
        places = [i for i, buffer in enumerate(self.buffers) if isinstance(buffer, tuple)]
        made = {i: mx.zeros(*self.buffers[i]) for i in places}
        mx.eval(list(made.values()))
        run_metal(
            self.source,
            self.function,
            {**dict(enumerate(self.buffers)), **made},
            [g * t for g, t in zip(self.groups, self.threads, strict=True)],
            self.threads,
            constants=self.constants,
            include_dirs=[INCLUDE],
            outputs=places,
            options=options,
            name="mlx",
        )
        return list(made.values())


def run_mlx(*arguments: Any, checked: bool = True, **named: Any) -> list[mx.array]:
    """Run a Dispatch of these arguments with all options."""
    return with_all_options(Dispatch(*arguments, **named).run, checked=checked)


def softmax(dtype: str, rows: int, width: int, looped: bool = False) -> tuple[Dispatch, np.ndarray]:
    """Also what it has to give."""
    x, x64 = random((rows, width), dtype)
    function = "softmax_looped" if looped else "softmax_single_row"
    e = np.exp(x64 - x64.max(-1, keepdims=True))
    dispatch = Dispatch(
        metal("softmax.h", before=("defines.h",)),
        f"{function}<{dtype}, float>",
        [x, (x.shape, x.dtype), np.int32(width)],
        (rows, 1, 1),
        (1024 if looped else -(-width // 128) * 32, 1, 1),
    )
    return dispatch, e / e.sum(-1, keepdims=True)


def sort(rows: int, width: int) -> tuple[Dispatch, np.ndarray]:
    """Merges in threadgroup memory.  Also what it has to give."""
    x, x64 = random((rows, width), "half")
    numbers = (np.int32(n) for n in (width, 1, 1, width, width))
    buffers = [x, (x.shape, x.dtype), *numbers]
    function = "block_sort<half, half, false, 64, 4>"
    dispatch = Dispatch(metal("sort.h"), function, buffers, (1, rows, 1), (64, 1, 1))
    return dispatch, np.sort(x64, -1)
