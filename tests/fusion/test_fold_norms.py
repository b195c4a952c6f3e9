"""Norm weights that a model computes in each call are computed once."""

import mlx.nn as nn
import pytest

from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.layers import fold_norm_weights


class OnePlus(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.weight = mx.random.normal((16,)).astype(mx.bfloat16)
        self._factor = factor

    def __call__(self, x):
        return mx.fast.rms_norm(x, 1.0 + self.weight, 1e-3)


class Scaled(OnePlus):
    def __call__(self, x):
        return self._factor * super().__call__(x)


class Wider(OnePlus):
    """The weight is float32, and the rows have another type."""

    def __call__(self, x):
        return mx.fast.rms_norm(x, 1.0 + self.weight.astype(mx.float32), 1e-3)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = [[kind()], nn.RMSNorm(16)]

    def __call__(self, x):
        return self.layers[1](self.layers[0][0](x))


def test_a_computed_weight_is_computed_once():
    model, x = Model(OnePlus), mx.random.normal((3, 1, 16)).astype(mx.bfloat16)
    plain, expected = model.layers[1], model(x)
    fold_norm_weights(model)
    norm = model.layers[0][0]
    assert type(norm) is nn.RMSNorm
    assert norm.eps == 1e-3
    assert model.layers[1] is plain
    assert mx.array_equal(model(x), expected)


@pytest.mark.parametrize("kind", [Scaled, Wider, lambda: nn.Embedding(16, 4), nn.GELU])
def test_any_other_module_stays(kind):
    model = Model(kind)
    before = model.layers[0][0]
    fold_norm_weights(model)
    assert model.layers[0][0] is before
