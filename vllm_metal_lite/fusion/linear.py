"""Linear layers that record an origin while a fused forward is built; otherwise MLX's own.

Only the instances of one model change class, so other models in the process are unaffected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.traced import Multiplied, Normed, as_view, origin_of, rows_of
from vllm_metal_lite.kernels.skinny_gemm import fits

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


class FusedLinear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        skinny_rows = _skinny_rows.get()
        if skinny_rows is None:
            return super().__call__(x)
        rows, weight = rows_of(x), self["weight"]
        if "bias" in self:
            return as_view(super().__call__(rows), x.shape[:-1])
        if len(rows) in skinny_rows and fits(rows, weight):
            origin = origin_of(x)
            normed = origin if isinstance(origin, Normed) else Normed(rows, None)
            product = Multiplied(normed, weight)
            return as_view(product(), x.shape[:-1], product)
        return as_view(rows @ _transposed(self), x.shape[:-1])


def _transposed(linear: nn.Linear) -> mx.array:
    """The transposed weight, made once: a new view would be a graph node in every step."""
    weight = linear["weight"]
    known, view = linear.get("_transposed", (None, None))
    if known is not weight:
        view = weight.T
        mx.eval(view)
        linear["_transposed"] = weight, view  # a tuple is not a parameter
    return view


class FusedQuantizedLinear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        if _skinny_rows.get() is None:
            return super().__call__(x)
        return as_view(super().__call__(rows_of(x)), x.shape[:-1])


_CLASSES: dict[type, type] = {nn.Linear: FusedLinear, nn.QuantizedLinear: FusedQuantizedLinear}


def fuse_linears(model: nn.Module) -> None:
    """Prepare the model's linear layers for fused forwards, in place."""
    for _, module in model.named_modules():
        if fused := _CLASSES.get(type(module)):
            module.__class__ = fused
