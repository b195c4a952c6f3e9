"""Linear layers that record an origin while a fused forward is built; otherwise MLX's own.

Only the instances of one model change class, so other models in the process are unaffected.
"""

from collections.abc import Callable
from functools import partial

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.fusion.current import current
from vllm_metal_lite.fusion.origins import Multiplied, Normed
from vllm_metal_lite.fusion.traced import as_view, origin_of, rows_of
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.skinny_gemm import fits
from vllm_metal_lite.kernels.weights import Weight, shape_of
from vllm_metal_lite.model.usage import weight_of


def _product(layer: nn.Module, x: mx.array, original: Callable[[mx.array], mx.array]) -> mx.array:
    """The layer's product, by `skinny_gemm` where that serves it."""
    skinny_rows = current().skinny_rows
    if skinny_rows is None:
        return original(x)
    rows, weight, bias = rows_of(x), weight_of(layer), layer.get("bias")
    plain = bias is None or bias.dtype == x.dtype
    if len(rows) in skinny_rows and plain and fits(rows, weight):
        product = Multiplied(*_normed(x, weight), weight, bias)
        return as_view(product(), x.shape[:-1], product)
    if isinstance(layer, nn.Linear) and bias is None:
        return as_view(rows @ _transposed(layer), x.shape[:-1])
    return as_view(original(rows), x.shape[:-1])


def _normed(x: mx.array, weight: Weight) -> tuple[mx.array, RMSNorm | None]:
    """The rows of x before their norm, and the norm, if each threadgroup of the product should
    compute the norm; otherwise the rows of x, and None."""
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


def _fused(base: type, product: str) -> type:
    """A subclass whose method named by `product` calls `_product`."""

    def call(self: nn.Module, x: mx.array) -> mx.array:
        return _product(self, x, partial(getattr(base, product), self))

    return type(base.__name__, (base,), {product: call})


_FUSED: dict[type, type] = {
    **{base: _fused(base, "__call__") for base in (nn.Linear, nn.QuantizedLinear)},
    **{base: _fused(base, "as_linear") for base in (nn.Embedding, nn.QuantizedEmbedding)},
}


def fuse_linears(model: nn.Module) -> None:
    """Prepare the model's linear layers, and embeddings used as such, for fused forwards."""
    for _, module in model.named_modules():
        if fused := _FUSED.get(type(module)):
            module.__class__ = fused
