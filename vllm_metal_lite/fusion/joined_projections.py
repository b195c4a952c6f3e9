"""Joins projections of one input into one matrix product: q, k and v; gate and up.

One token through the model shows which projections share an input.  Their weights are concatenated.
The first projection that a forward calls computes the joined product; each returns its columns:

    q = q_proj(x)       computes x @ [Wq Wk Wv]     columns 0 to 63
    k = k_proj(x)       computes nothing            columns 64 to 95
    v = v_proj(x)       computes nothing            columns 96 to 127

A decode step consists mostly of small products, so fewer of them make it faster.
"""

from collections import Counter
from itertools import groupby
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.traced import Traced, origin_of, rows_of
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.model.calls import calls_of

_KINDS: tuple[Any, ...] = (nn.Linear, nn.QuantizedLinear)
# The parameters of a projection whose rows are outputs.
_BY_OUTPUT = ("weight", "scales", "biases", "bias")


class JoinedProjection:
    """Several projections as one.  Keeps a product until each projection has its part."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.linear = modules[0]
        self.ends = [0]
        for module in modules:
            self.ends.append(self.ends[-1] + module.weight.shape[0])
        for name in _BY_OUTPUT:
            if name in self.linear:
                self.linear[name] = mx.concatenate([m[name] for m in modules])
        self._x: mx.array | None = None
        self._y: mx.array | None = None
        self._wanted: set[int] = set()

    def part(self, index: int, x: mx.array) -> mx.array:
        """x (..., inputs) times the weights of projection `index`."""
        if self._x is not x or index not in self._wanted:
            self._x, self._y = x, self.linear(x)
            self._wanted = set(range(len(self.ends) - 1))
        assert self._y is not None
        y, start, end = self._y, self.ends[index], self.ends[index + 1]
        self._wanted.discard(index)
        if not self._wanted:
            self.forget()
        return Traced(y[..., start:end], Columns(rows_of(y), start, origin_of(y)))

    def forget(self) -> None:
        """Drop the arrays of the finished forward."""
        self._x = self._y = None
        self._wanted = set()


class JoinedPart(nn.Module):
    """Replaces one of the joined projections."""

    def __init__(self, whole: JoinedProjection, index: int) -> None:
        super().__init__()
        self.whole, self.index = whole, index
        if index == 0:
            self.joined = whole.linear  # registers the weights as parameters, once

    def __call__(self, x: mx.array) -> mx.array:
        return self.whole.part(self.index, x)

    @property
    def weight(self) -> mx.array:
        start, end = self.whole.ends[self.index : self.index + 2]
        return self.whole.linear["weight"][start:end]


def joined_projections(model: nn.Module) -> list[JoinedProjection]:
    """The joined projections of a model."""
    parts = (module for _, module in model.named_modules() if isinstance(module, JoinedPart))
    return [part.whole for part in parts if part.index == 0]


def join_projections(model: nn.Module) -> None:
    """Join projections that share an input, in place."""
    for paths in _same_inputs(model):
        modules = dict(model.named_modules())
        # Popped: references to the old modules would keep all weights twice, not one group's.
        whole = JoinedProjection([modules.pop(path) for path in paths])
        mx.eval(whole.linear.parameters())
        parts = [(path, JoinedPart(whole, i)) for i, path in enumerate(paths)]
        model.update_modules(tree_unflatten(parts))
        mx.clear_cache()


def _same_inputs(model: nn.Module) -> list[list[str]]:
    """The paths of projections that share a parent and an input, and are called once."""
    found = {id(m): (path, m) for path, m in model.named_modules() if type(m) in _KINDS}
    calls = calls_of(model, [module for _, module in found.values()])
    counts = Counter(id(module) for module, _, _ in calls)

    def shared(call: tuple[nn.Module, Any, Any]) -> tuple:
        module, x, _ = call
        return found[id(module)][0].rpartition(".")[0], id(x), *_kind_of(module)

    sharing = [
        [found[id(module)][0] for module, _, _ in alike if counts[id(module)] == 1]
        for _, alike in groupby(calls, shared)
    ]
    return [paths for paths in sharing if len(paths) > 1]


def _kind_of(module: nn.Module) -> tuple:
    """The properties that joined projections must share."""
    how = [getattr(module, name, None) for name in ("bits", "group_size", "mode")]
    return (
        type(module),
        *how,
        *((n, module[n].dtype) for n in _BY_OUTPUT if module.get(n) is not None),
    )
