"""Linear layers that record an origin while a fused forward is built; otherwise MLX's own.

Only the instances of one model change class, so other models in the process are unaffected.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.fusion.origins import Multiplied, Normed
from vllm_metal_lite.fusion.traced import as_view, origin_of, rows_of
from vllm_metal_lite.kernels.skinny_gemm import RowNorm, fits
from vllm_metal_lite.kernels.weights import Weight, shape_of
from vllm_metal_lite.model.usage import weight_of

# The row counts that use `skinny_gemm`; None: no fused forward is being built.
_skinny_rows: ContextVar[range | None] = ContextVar("skinny_rows", default=None)


@contextmanager
def fusing(skinny_rows: range) -> Iterator[None]:
    """Held while a fused forward is built."""
    token = _skinny_rows.set(skinny_rows)
    try:
        yield
    finally:
        _skinny_rows.reset(token)


def _product(layer: nn.Module, x: mx.array, original: Callable[[mx.array], mx.array]) -> mx.array:
    """The layer's product, by `skinny_gemm` where that serves it."""
    skinny_rows = _skinny_rows.get()
    if skinny_rows is None:
        return original(x)
    rows, weight, bias = rows_of(x), weight_of(layer), layer.get("bias")
    plain = bias is None or bias.dtype == x.dtype
    if len(rows) in skinny_rows and plain and fits(rows, weight):
        origin, norm = origin_of(x), None
        if isinstance(origin, Normed) and _normalises(origin, weight):
            rows, norm = origin.x, RowNorm(origin.weight, origin.eps)
        product = Multiplied(rows, norm, weight, bias)
        return as_view(product(), x.shape[:-1], product)
    if isinstance(layer, nn.Linear) and bias is None:
        return as_view(rows @ _transposed(layer), x.shape[:-1])
    return as_view(original(rows), x.shape[:-1])


def _normalises(normed: Normed, weight: Weight) -> bool:
    """Whether each threadgroup of a product with this weight normalises the rows itself."""
    device, (outputs, depth, how) = profile(), shape_of(weight)
    if normed.weight is None or normed.x.ndim != 2 or len(normed.x) > device.max_normed_rows:
        return False
    return how is None or outputs * depth <= device.max_normed_weights


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
    """The class, with the method `product` by `_product`."""

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
