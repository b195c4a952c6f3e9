"""A stand-in for `mx.fast.metal_kernel` that orders launches as a GPU may: by what they declare.

Launches are noted and answered with arrays that hold nothing yet.  `run` then executes them on the
CPU host in any order in which a launch comes after those whose outputs it takes, and after no
other: a write through an input, which MLX cannot see, orders nothing.  Between launches no MLX
operation may look at the outputs.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from metal.host import HostKernel
from vllm_metal_lite.backend import mx


class Launches:
    """What was launched since the recording began."""

    def __init__(self) -> None:
        self.launches: list[tuple[HostKernel, dict[str, Any]]] = []
        self.outputs: list[list[mx.array]] = []  # kept, so that an id stays one array's
        self.made_by: dict[int, int] = {}

    def launcher(self, *args: Any, **kwargs: Any) -> Callable[..., list[mx.array]]:
        kernel = HostKernel(*args, **kwargs)

        def launch(**call: Any) -> list[mx.array]:
            shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            outputs = [mx.zeros(shape, dtype) for shape, dtype in shapes]
            mx.eval(outputs)
            self.made_by |= {id(a): len(self.launches) for a in outputs}
            self.launches.append((kernel, call))
            self.outputs.append(outputs)
            return outputs

        return launch

    def _needs(self, i: int) -> set[int]:
        """The launches whose outputs launch i takes."""
        return {self.made_by.get(id(a), -1) for a in self.launches[i][1]["inputs"]}

    def run(self, pick: Callable[[list[int]], int]) -> dict[int, mx.array]:
        """Execute everything; `pick` chooses among the launches that may be next.

        Returns the results by the id of the array that was handed out for each.
        """
        results: dict[int, mx.array] = {}
        waiting = set(range(len(self.launches)))
        while waiting:
            ready = [i for i in sorted(waiting) if not self._needs(i) & waiting]
            i = pick(ready)
            kernel, call = self.launches[i]
            inputs = [results.get(id(a), a) for a in call["inputs"]]
            done = kernel(**call | {"inputs": inputs})
            results |= {id(a): r for a, r in zip(self.outputs[i], done, strict=True)}
            waiting.remove(i)
        return results


@contextmanager
def recording():
    """While open, kernels are noted and not run."""
    launches = Launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", launches.launcher)
        yield launches
