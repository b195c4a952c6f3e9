"""Rounding as a GPU has it: products of another shape are summed in another order.

MLX's CPU backend rounds each row by itself, so chunks there give the very bits of a single shot.
"""

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.trial import Row

EPSILON = 2**-9  # of bfloat16
_PRODUCTS = (nn.Linear, SwitchLinear, MultiLinear)


def rounding(model: nn.Module) -> nn.Module:
    """The model, whose products now have an error that depends on the shape of the result."""
    for number, (_, module) in enumerate(model.named_modules()):
        if type(module) in _PRODUCTS:
            module.__class__ = _rounded(type(module), number)
    return model


def _rounded(base: type, number: int) -> type:
    def call(self, x, *args, **kwargs):
        y = base.__call__(self, x, *args, **kwargs)
        key = mx.random.key(1000 * number + sum(7**i * n for i, n in enumerate(y.shape)))
        return y * (1 + EPSILON * mx.random.normal(y.shape, key=key)).astype(y.dtype)

    return type(base.__name__, (base,), {"__call__": call})


def of_16_bits(gather_mm):
    """`mx.gather_mm`, which on a CPU multiplies float32 only, for other types too."""

    def call(a, b, *args, **how):
        y = gather_mm(a.astype(mx.float32), b.astype(mx.float32), *args, **how)
        return y.astype(a.dtype)

    return call


def gather_in_16_bits(patch: pytest.MonkeyPatch) -> None:
    """`mx.gather_mm` multiplies other types than float32, too."""
    patch.setattr(mx, "gather_mm", of_16_bits(mx.gather_mm))


def quantised_of_16_bits(x, w, scales, biases=None, transpose=True, **how):
    """`mx.quantized_matmul`, which on a CPU errs by some percent for 16 bits, in float32."""
    assert transpose
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    weight = mx.dequantize(w, scales, biases, dtype=mx.float32, **how)
    return (x.astype(mx.float32) @ weight.T).astype(x.dtype)


def medians(rows: list[Row]) -> list[float]:
    """The median error of each kind of row in a trial."""
    kinds = {row.kind for row in rows}
    return [float(np.median([r.error for r in rows if r.kind == kind])) for kind in kinds]
