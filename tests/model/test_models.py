"""Side effects that wrapping a model must not have.  test_conformance tests the results."""

import numpy as np
import pytest

from tests.support.models import tiny_models as tiny
from tests.support.models.bench import SEQUENCES, Bench, packed
from tests.support.models.conformance import TOLERANCE
from vllm_metal_lite.attention.sdpa.reference import ReferenceStepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.loader import LoadedModel


def largest_error(model: LoadedModel, native: str) -> float:
    """Of the logits of packed prompts and decodes, relative to their scale."""
    expected = [tiny.logits_alone(tiny.native(native), s) for s in SEQUENCES]
    scale = max(np.abs(e).max() for e in expected)
    errors = [np.abs(x - expected[r][n - 1]).max() for (r, n), x in packed(Bench(model)).items()]
    return float(np.max(errors) / scale)  # NaN stays NaN, and fails every comparison


@pytest.mark.parametrize(("name", "share"), [("llama/q4", 0.3), ("llama/q8", 0.5)])
def test_quantised_weights_stay_quantised(name, share):
    quantised = tiny.packed(name)
    assert quantised.weight_bytes < share * tiny.packed("llama").weight_bytes
    assert quantised.vocab_size == tiny.VOCAB


def test_kernels_are_checked_in_the_type_of_the_store():
    """Phi's queries are float32 in every type; attention rounds them to the type of K."""
    shapes = tiny.packed("phi", mx.bfloat16).attention_shapes
    assert {shape.dtype for shape in shapes} == {mx.bfloat16}


def test_wrapping_a_model_twice_changes_nothing():
    config = tiny.config_of("gemma2")
    model = tiny.build(config)
    loader.from_model(model, None, config, "first")
    again = loader.from_model(model, None, config, "again")
    assert largest_error(again, "gemma2") < TOLERANCE


def test_a_failing_forward_leaves_the_model_and_mlx_as_they_were(monkeypatch):
    name = "llama"
    sdpa, bench = mx.fast.scaled_dot_product_attention, Bench(tiny.packed(name))
    with monkeypatch.context() as m:
        m.setattr(ReferenceStepAttention, "attend", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            packed(bench)
    assert mx.fast.scaled_dot_product_attention is sdpa
    assert largest_error(tiny.packed(name), name) < TOLERANCE
    wrapped = tiny.packed(name).packed.model
    np.testing.assert_array_equal(
        tiny.logits_alone(wrapped, SEQUENCES[2]), tiny.logits_alone(tiny.native(name), SEQUENCES[2])
    )


def test_a_layer_that_keeps_what_nobody_knows_is_refused_by_name(monkeypatch):
    class OddCache:
        offset = 0

    config = tiny.config_of("llama")
    model = tiny.build(config)
    monkeypatch.setattr(type(model), "make_cache", lambda self: [OddCache()] * 3, raising=False)
    with pytest.raises(ModelLoadError, match=r"llama is not supported.*OddCache"):
        loader.from_model(model, None, config, "the-model")
