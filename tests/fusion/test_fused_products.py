"""Products fused with the operations around them give the results of a model's own operations."""

from functools import partial

import mlx.nn as nn
import numpy as np
import pytest

from metal.host import installed
from tests.support.kernels.arrays import floats, seeded
from tests.support.kernels.launches import watch
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import CONFIGS
from tests.support.models.fused import Fused
from tests.support.models.rounding import medians, of_16_bits, quantised_of_16_bits
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.joined_projections import JoinedProjection
from vllm_metal_lite.fusion.launches import FusedLaunches
from vllm_metal_lite.fusion.layers import fuse_layers
from vllm_metal_lite.fusion.norms import Normed
from vllm_metal_lite.fusion.products import Product
from vllm_metal_lite.fusion.traced import Traced, as_view, origin_of

# Model -> which of a norm, a residual sum and SwiGLU are fused with its products.
FUSED = {
    "qwen3": {"NORM", "RESIDUAL", "GATE"},
    "llama": {"NORM", "RESIDUAL", "GATE"},
    "qwen2": {"NORM", "RESIDUAL", "GATE", "BIAS"},
    "gemma3_text": {"NORM", "GATE"},
    "mixtral": {"NORM", "RESIDUAL"},  # it has a router and experts
    "cohere": {"GATE"},
    "hunyuan_v1_dense": {"NORM", "RESIDUAL", "GATE"},
}


ALL = {"NORM", "RESIDUAL", "GATE"}
QUANTISED = {"llama/q4": ALL, "llama/q6": ALL, "llama/q8": ALL, "llama/mxfp4": ALL,
             "llama/mixed": ALL, "qwen3/tied": ALL}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FUSED | QUANTISED)
def test_a_model_of_16_bits_computes_the_same(monkeypatch, name):
    """The logits are as near to the model's own as without fusion.  Steps have 2 to 7 rows."""
    fused, widths = set(), set()

    def note(kernel, arrays, template):
        fused.update(what for what in ("NORM", "RESIDUAL", "GATE", "BIAS") if template.get(what))
        if kernel == "skinny_gemm":
            widths.add((template["BITS"], len(arrays[1])))

    watch(monkeypatch, note)
    monkeypatch.setattr(mx, "gather_mm", of_16_bits(mx.gather_mm))
    monkeypatch.setattr(mx, "quantized_matmul", quantised_of_16_bits)
    monkeypatch.setitem(CONFIGS, "qwen3/tied", CONFIGS["llama/q4"] | {"tie_word_embeddings": True})
    # MLX's embeddings in mxfp4 have this type, whatever the type of the others.
    model = Fused(tiny.load(name, mx.bfloat16 if "mxfp4" in name else mx.float16))
    with installed():
        for few in (range(0), range(1, 65)):
            fused.clear()
            assert max(medians(model.rows(skinny_rows=few))) < 0.02
            assert fused == ((FUSED | QUANTISED)[name] if few else set())
    quantised = {bits for bits, _ in widths} - {16}
    assert quantised == BITS.get(name, set())
    assert model.layout.vocab_size in {outputs for _, outputs in widths}  # the head


BITS = {"llama/q4": {4}, "llama/q6": {6}, "llama/q8": {8}, "llama/mxfp4": {4},
        "llama/mixed": {4, 6, 8}, "qwen3/tied": {4}}  # fmt: skip


# Values that several operations use


DEPTH = 64


@pytest.fixture
def hooked():
    """While this holds, a fused forward is built, and the kernel computes products of any number of
    rows."""
    fusion = FusedLaunches(named=((_Activations, "swiglu"),), skinny_rows=range(1, 65))
    with installed(), fusion.building(_Step()):
        yield


class _Step:
    positions = num_live = mx.zeros((1,), mx.int32)


class _Activations:
    @staticmethod
    def swiglu(gate, up):
        return nn.silu(gate) * up


draw = partial(seeded, seed=0, dtype=mx.float16)


def linear(outputs: int, seed: int = 1) -> nn.Linear:
    layer = nn.Linear(DEPTH, outputs, bias=False)
    layer.weight = draw(outputs, DEPTH, seed=seed) / 8
    fuse_layers(layer)
    return layer


def close(got: mx.array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(floats(got), expected, rtol=4e-3, atol=4e-3)


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


GAIN = mx.ones((DEPTH,), mx.float16)


def test_a_product_that_is_used_beside_its_sum(hooked):
    x, residual, o = draw(3, 1, DEPTH), draw(3, 1, DEPTH, seed=2), linear(DEPTH)
    y = o(x)
    total = residual + y
    normed = mx.fast.rms_norm(total, GAIN, 1e-5)
    expected = floats(x) @ floats(o.weight).T
    close(y * 2, 2 * expected)
    close(total, floats(residual) + expected)
    close(normed, rms(floats(residual) + expected))
    close(total + y, floats(residual) + 2 * expected)


def test_a_sum_of_two_products_and_of_one_with_itself(hooked):
    x, o, p = draw(2, 1, DEPTH), linear(DEPTH), linear(DEPTH, seed=3)
    y, z = o(x), p(x)
    of_y, of_z = (floats(x) @ floats(layer.weight).T for layer in (o, p))
    close(mx.fast.rms_norm(y + z, GAIN, 1e-5), rms(of_y + of_z))
    close(mx.fast.rms_norm(y + y, GAIN, 1e-5), rms(2 * of_y))


def test_a_sum_whose_norm_is_taken_twice(hooked):
    """Two norms of one sum have weights of their own, as in models with a branch."""
    x, residual, o = draw(3, 1, DEPTH), draw(3, 1, DEPTH, seed=2), linear(DEPTH)
    gain = draw(DEPTH, seed=5)
    total = residual + o(x)
    first, second = (mx.fast.rms_norm(total, g, 1e-5) for g in (GAIN, gain))
    expected = rms(floats(residual) + floats(x) @ floats(o.weight).T)
    close(first, expected)
    close(second, expected * floats(gain))


def test_a_norm_that_a_router_and_a_product_use(hooked):
    x, router, o = draw(3, 1, DEPTH), draw(DEPTH, 4, seed=4) / 8, linear(24)
    normed = mx.fast.rms_norm(x, GAIN, 1e-5)
    assert isinstance(origin_of(normed), Normed)
    y, chosen = o(normed), normed @ router
    assert isinstance(origin_of(y), Product)
    close(y, rms(floats(x)) @ floats(o.weight).T)
    close(chosen, rms(floats(x)) @ floats(router))
    close(normed, rms(floats(x)))


def test_a_norm_or_product_that_is_changed_in_place_is_computed_as_it_is(hooked):
    x, o = draw(3, 1, DEPTH), linear(24)
    normed = mx.fast.rms_norm(x, GAIN, 1e-5)
    normed *= 2
    assert origin_of(normed) is None
    y = o(normed)
    expected = 2 * rms(floats(x)) @ floats(o.weight).T
    close(y, expected)
    y[..., 3] = 7.0
    assert origin_of(y) is None
    expected[..., 3] = 7.0
    total = y + as_view(mx.zeros((3, 24), mx.float16), (3, 1))
    close(mx.fast.rms_norm(total, mx.ones((24,), mx.float16), 1e-5), rms(expected))


def test_a_norm_with_a_gain_of_another_type_or_none_goes_by_itself(hooked):
    x, o = draw(3, 1, DEPTH), linear(24)
    for gain in (None, mx.ones((DEPTH,), mx.float32)):
        normed = mx.fast.rms_norm(x, gain, 1e-5)
        y = o(normed if gain is None else normed.astype(mx.float16))
        assert origin_of(y).norm is None
        close(y, rms(floats(x)) @ floats(o.weight).T)


@pytest.mark.parametrize(("gate", "up"), [(0, 1), (1, 0)])
def test_swiglu_of_the_product_only_if_gate_comes_first(hooked, gate, up):
    parts = [linear(32), linear(32, seed=3)]
    x, weights = draw(2, 1, DEPTH), [floats(part.weight) for part in parts]
    product = JoinedProjection(parts)
    columns = [product.part(n, x) for n in range(2)]
    got = _Activations.swiglu(columns[gate], columns[up])
    of_gate, of_up = (floats(x) @ weights[n].T for n in (gate, up))
    close(got, of_gate / (1 + np.exp(-of_gate)) * of_up)
    assert (type(got) is Traced) is (gate < up)
