"""Which launches a step takes: kernels are stubs, and the graph of its results is walked.

Only launches that the results depend on count: MLX never runs a value that nobody uses.  Used
by tests of fusion and of compiled steps.
"""

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import Kernel, Template

# Primitives that launch nothing here.
_VIEWS = {
    "Broadcast", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose",
    "Unflatten",
}  # fmt: skip
# Template value -> the word for the additional work in a launch's name.
_ALSO = {
    "NORM": "NORM",
    "BIAS": "BIAS",
    "RESIDUAL": "RESIDUAL",
    "GATE": "GATE",
    "FUSED": "FUSED",
    "Y_NORM": "POST",
}


def watch(monkeypatch, note: Callable[[str, Sequence[mx.array], Template], object]) -> None:
    """Have `note` get the kernel's name, inputs and template values before each launch."""
    launch = Kernel.__call__

    def noting(self, arrays, template, *args):
        note(self.name, arrays, template)
        return launch(self, arrays, template, *args)

    monkeypatch.setattr(Kernel, "__call__", noting)


class Stubs:
    """Replaces kernels, and mx.fast.rms_norm, which is one launch on a GPU only."""

    def __init__(self, monkeypatch) -> None:
        self._leaves, self._number = {}, count()
        monkeypatch.setattr(Kernel, "__call__", self._kernel())
        monkeypatch.setattr(mx.fast, "rms_norm", self._rms_norm)

    def _kernel(self):
        def launch(kernel, arrays, template, grid, threadgroup, outputs):
            name = " ".join([kernel.name, *(word for a, word in _ALSO.items() if template.get(a))])
            return self._zeros(name, arrays, outputs)

        return launch

    def _rms_norm(self, x, weight, eps):
        return self._zeros("rms_norm", [x, weight], [(x.shape, x.dtype)])[0]

    def _zeros(self, name, arrays, outputs):
        zeros = [mx.zeros(*output) for output in outputs]
        mx.eval(zeros)
        self._leaves[f"{name}, {next(self._number)}"] = zeros[0]
        return mx.depends(zeros, [a for a in arrays if a is not None])

    def needed(self, *arrays: mx.array) -> Counter:
        """Launches and MLX's own launching primitives from which arrays are computed, by name; then
        forgets those of before."""
        dot = io.StringIO()
        mx.export_to_dot(dot, *arrays, **self._leaves)
        names = set(re.findall(r'"([^"]+)" ->', dot.getvalue()))
        launches = Counter(n.partition(",")[0] for n in self._leaves if n in names)
        self._leaves.clear()
        primitives = re.findall(r'label ="(\w+)"', dot.getvalue())
        return launches + Counter(p for p in primitives if p not in _VIEWS)
