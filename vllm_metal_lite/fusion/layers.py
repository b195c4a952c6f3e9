"""Changes the layers of one model for fused forwards: fewer norms and launches.

A norm that computes its weight in each call, such as 1 + weight, computes it once.  This saves a
small launch per norm, and Gemma has six norms per layer.

Linear layers and mixtures run by our kernels while a fused forward is built; otherwise by MLX.
Only the instances of one model change class, so other models in the process are unaffected.
"""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.fusion.context import fusion_context
from vllm_metal_lite.fusion.norms import Normed
from vllm_metal_lite.fusion.products import ExpertResults, Product
from vllm_metal_lite.fusion.traced import Function, as_view, origin_of, rows_of
from vllm_metal_lite.kernels import experts, skinny_gemm
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.weight_formats import Weight, shape_of
from vllm_metal_lite.model.layer_weights import MIXTURES, weight_of
from vllm_metal_lite.model.layer_weights import served as served_experts
from vllm_metal_lite.model.seam.hooks import hooked


def fold_norm_weights(model: nn.Module) -> None:
    """Replace norms that compute their weight by nn.RMSNorm, in place.  Results stay the same to
    the bit."""
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
