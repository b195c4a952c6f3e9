"""Changes the layers of one model for fused forwards: fewer products, norms and launches.

Projections of one input become one matrix product: q, k and v; gate and up.  One token through the
model shows which projections share an input.  Their weights are concatenated.  The first projection
called computes the joined product; each returns its columns.  A decode step consists mostly of
small products, so fewer of them make it faster.

A norm that computes its weight in each call, such as 1 + weight, computes it once.  This saves a
small launch per norm, and Gemma has six norms per layer.

Linear layers and mixtures run by our kernels while a fused forward is built; otherwise by MLX.
Only the instances of one model change class, so other models in the process are unaffected.
"""

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.fusion.context import fusion_context
from vllm_metal_lite.fusion.norms import Normed
from vllm_metal_lite.fusion.products import ExpertResults, Product
from vllm_metal_lite.fusion.traced import Function, Traced, as_view, origin_of, rows_of
from vllm_metal_lite.kernels import experts, skinny_gemm
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm
from vllm_metal_lite.kernels.weight_formats import Weight, shape_of
from vllm_metal_lite.model.calls import calls_of
from vllm_metal_lite.model.layer_weights import MIXTURES, weight_of
from vllm_metal_lite.model.layer_weights import served as served_experts
from vllm_metal_lite.model.seam.hooks import hooked

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


def fold_norm_weights(model: nn.Module) -> None:
    """Replace such norms by nn.RMSNorm, in place.  Results stay the same to the bit."""
    found = [
        (path, folded)
        for path, module in model.named_modules()
        if list(module) == ["weight"] and (folded := _folded(module)) is not None
    ]
    model.update_modules(tree_unflatten(found))


def _folded(module: nn.Module) -> nn.RMSNorm | None:
    """A norm with the weight that the module computes; None if the module does anything else."""
    weight = module["weight"]
    if not isinstance(weight, mx.array) or weight.ndim != 1:
        return None
    x = mx.zeros((1, 1, weight.size), weight.dtype)
    calls: list[tuple[mx.array, mx.array, float, mx.array]] = []

    def rms_norm(
        original: Callable, x: mx.array, weight: mx.array, eps: float, **kwargs: Any
    ) -> mx.array:
        calls.append((x, weight, eps, original(x, weight, eps, **kwargs)))
        return calls[-1][-1]

    try:
        with hooked([(mx.fast, "rms_norm", rms_norm)]):
            out = module(x)
    except Exception:  # no norm, and not meant to be called like one
        return None
    if len(calls) != 1:
        return None
    given, used, eps, normed = calls[0]
    if given is not x or out is not normed or used is weight or not isinstance(used, mx.array):
        return None
    if (used.shape, used.dtype) != (weight.shape, weight.dtype):
        return None
    norm = nn.RMSNorm(weight.size, eps)
    norm.weight = used
    mx.eval(norm.weight)
    return norm


def _product(original: Function, layer: nn.Module, x: mx.array) -> mx.array:
    """The product of a linear layer, or of an embedding used as one."""
    if fusion_context().step is None:
        return original(layer, x)
    rows, weight, bias = rows_of(x), weight_of(layer), layer.get("bias")
    served = (bias is None or bias.dtype == x.dtype) and skinny_gemm.serves(rows, weight)
    if served and len(rows) in fusion_context().kernels.skinny_rows:
        product = Product(*_rows_and_norm(x, weight), weight, bias)
        return as_view(product(), x.shape[:-1], product)
    if isinstance(layer, nn.Linear) and bias is None:
        return as_view(rows @ _transposed(layer), x.shape[:-1])
    return as_view(original(layer, rows), x.shape[:-1])


def _rows_and_norm(x: mx.array, weight: Weight) -> tuple[mx.array, RMSNorm | None]:
    """(The rows before their norm, the norm) if the product should compute the norm; otherwise (the
    rows of x, None)."""
    origin, device, (outputs, depth, how) = origin_of(x), profile(), shape_of(weight)
    small = how is None or outputs * depth <= device.max_normed_weights
    if not small or not isinstance(origin, Normed) or origin.norm.weight is None:
        return rows_of(x), None
    if origin.x.ndim != 2 or len(origin.x) > device.max_normed_rows:
        return rows_of(x), None
    return origin.x, origin.norm


def _transposed(linear: nn.Linear) -> mx.array:
    """The transposed weight, made once: a new view would be a graph node in every step."""
    weight = linear["weight"]
    known, view = linear.get("_transposed", (None, None))
    if known is not weight:
        view = weight.T
        mx.eval(view)
        linear["_transposed"] = weight, view  # a tuple is not a parameter
    return view


def _mixture(original: Function, layer: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
    """The results (*indices.shape, hidden) of a mixture of experts."""
    step, kernels = fusion_context()
    num_rows = x.size // x.shape[-1]
    if indices.shape[:-1] != x.shape[:-1] or num_rows not in kernels.expert_rows:
        return original(layer, x, indices)
    rows, chosen, mixture = rows_of(x), rows_of(indices), served_experts(layer)
    if mixture is None or not experts.serves(rows, chosen, mixture):
        return original(layer, x, indices)
    num_live = None if step is None else step.num_live
    result = experts.expert_mlp(rows, chosen, mixture, num_live=num_live)
    shape = (*indices.shape, result.shape[-1])
    return as_view(result, shape[:-1], ExpertResults(result, shape))


def _fused(base: Any, name: str, function: Function) -> type:
    """A subclass whose method `name` is `function` of the original method and its arguments."""

    def call(self: nn.Module, *args: mx.array) -> mx.array:
        return function(getattr(base, name), self, *args)

    return type(base.__name__, (base,), {name: call})


_FUSED: dict[type, type] = {
    **{base: _fused(base, "__call__", _product) for base in (nn.Linear, nn.QuantizedLinear)},
    **{base: _fused(base, "as_linear", _product) for base in (nn.Embedding, nn.QuantizedEmbedding)},
    **{base: _fused(base, "__call__", _mixture) for base in MIXTURES},
}


def fuse_layers(model: nn.Module) -> None:
    """Prepare the model's layers for fused forwards."""
    for _, module in model.named_modules():
        fused = _FUSED.get(type(module))
        if fused is not None and (not isinstance(module, MIXTURES) or served_experts(module)):
            module.__class__ = fused
