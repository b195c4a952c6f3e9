"""Mixtures of experts by the kernels give the results of a model's own operations."""

from dataclasses import replace

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwitchGLU

from metal.host import installed
from tests.support.kernels.arrays import floats
from tests.support.kernels.expert_cases import EXPERT_KERNELS
from tests.support.kernels.launches import watch
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from tests.support.models.fused import Fused
from tests.support.models.rounding import medians, of_16_bits
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.launches import FusedLaunches
from vllm_metal_lite.fusion.layers import fuse_layers
from vllm_metal_lite.fusion.products import Summed
from vllm_metal_lite.fusion.traced import origin_of
from vllm_metal_lite.kernels import experts
from vllm_metal_lite.model.layer_weights import mixtures

FEW = range(1, 65)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "qwen3_moe/mxfp4", "olmoe", "mixtral", "mixtral/q4", "deepseek", "glm4_moe",
     "gpt_oss", "granitemoe", "gemma4_text/moe", "nemotron_h", "glm4_moe_lite", "deepseek_v3/q4",
     "lfm2_moe", "qwen2_moe", "qwen3_next", "minimax"],
)  # fmt: skip
def test_a_model_of_16_bits_computes_the_same(monkeypatch, name):
    """The logits are about as near to the model's own as without fusion.  Steps have 2 to 7
    rows."""
    launched = set()
    watch(monkeypatch, lambda kernel, *_: launched.add(kernel))
    odd = config_of(name)["moe_intermediate_size"] % 32  # no model has this format
    # Embeddings in mxfp4 are bfloat16, which rounds eight times as much.
    dtype, tolerance = (mx.bfloat16, 0.08) if "mxfp4" in name else (mx.float16, 0.02)
    model = Fused(tiny.load(name, dtype, **({"moe_intermediate_size": 64} if odd else {})))
    latents = any(shape.latent for shape in model.shapes)
    with installed():
        for rows in (range(0), FEW):
            launched.clear()
            assert max(medians(model.rows(expert_rows=rows))) < tolerance
            assert launched & EXPERT_KERNELS == (EXPERT_KERNELS if rows else set())
            assert "expert_topk" in launched
            assert ("latent_attention" in launched) == latents


# The seam


def layer(**changes) -> SwitchGLU:
    made = SwitchGLU(64, 96, 4, **changes)
    made.set_dtype(mx.bfloat16)
    return made


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(mx, "gather_mm", of_16_bits(mx.gather_mm))


@pytest.fixture
def building():
    with installed(), FusedLaunches(expert_rows=FEW).building(step=None):
        yield


X = mx.random.normal((5, 1, 64)).astype(mx.bfloat16)
CHOSEN = mx.array([[[0, 2]]] * 3 + [[[2, 1]]] * 2)
WEIGHTS = mx.softmax(mx.random.normal((5, 1, 2)), axis=-1)


def test_only_a_fused_forward_of_few_rows_uses_the_kernels(monkeypatch):
    """The numbers are also those of mlx-lm's code in other cases."""
    switch = layer()
    expected = floats(switch(X, CHOSEN))
    fuse_layers(switch_model := _Model(switch))
    assert type(switch_model.mlp) is not SwitchGLU
    monkeypatch.setattr(experts, "expert_mlp", None)
    np.testing.assert_array_equal(floats(switch(X, CHOSEN)), expected)
    with FusedLaunches(expert_rows=range(1, 5)).building(step=None):  # these choices are five
        np.testing.assert_array_equal(floats(switch(X, CHOSEN)), expected)


class _Model(nn.Module):
    def __init__(self, mlp) -> None:
        super().__init__()
        self.mlp = mlp


@pytest.mark.parametrize("activation", [None, SwigluOAI()])
def test_results_products_and_sums_are_mlx_lm_s(building, activation):
    """A model may write its sum in several ways, and also use the unsummed value."""
    how = {} if activation is None else {"activation": activation, "bias": True}
    switch = layer(**how)
    expected = switch(X, CHOSEN)
    fuse_layers(_Model(switch))
    got = switch(X, CHOSEN)
    assert got.shape == expected.shape == (5, 1, 2, 64)
    close = {"rtol": 0.02, "atol": 0.02 * float(mx.abs(expected).max())}
    np.testing.assert_allclose(floats(got), floats(expected), **close)
    weighted = got * WEIGHTS[..., None]
    assert weighted.dtype == mx.float32
    total = (expected * WEIGHTS[..., None]).sum(-2)
    for summed in (weighted.sum(axis=-2), weighted.sum(-2)):
        assert isinstance(origin_of(summed), Summed)
        np.testing.assert_allclose(floats(summed), floats(total), **close)
    rounded = weighted.sum(axis=-2).astype(mx.bfloat16)
    assert isinstance(origin_of(rounded), Summed)
    np.testing.assert_array_equal(floats(rounded), floats(summed.astype(mx.bfloat16)))
    np.testing.assert_allclose(floats(weighted + 0), floats(expected * WEIGHTS[..., None]), **close)
    for axis in (-1, 0, None):
        assert origin_of(weighted.sum(axis)) is None
    assert origin_of(got * WEIGHTS[..., :1, None]) is None
    assert origin_of(got * 2) is None


def test_other_activations_and_weights_are_left_alone():
    def gelu(x, gate):
        return mx.maximum(gate, 0) * x

    three_bits = layer()
    nn.quantize(three_bits, 32, 3)
    for other in (layer(activation=gelu), three_bits):
        fuse_layers(model := _Model(other))
        assert type(model.mlp) is SwitchGLU
        assert mixtures(model) == []


@pytest.mark.parametrize("kernel", sorted(EXPERT_KERNELS))
def test_without_one_of_its_kernels_none_is_used(kernel):
    fusion = FusedLaunches(expert_rows=FEW, skinny_rows=FEW)
    without = fusion.without([kernel])
    assert without == replace(fusion, expert_rows=range(0), unused=without.unused)
    assert fusion.without(["add_rms_norm"]).expert_rows == FEW
