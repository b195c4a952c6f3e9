"""Random models of the benchmarks: they pack, their logits are numbers, and context moves them."""

import numpy as np
import pytest

from tools.bench.lib.models import BITS, random_model, random_weights
from vllm_metal_lite.backend import mx

TINY = [
    ("qwen3-moe-tiny", None),
    ("qwen3-moe-tiny", "4"),
    ("gpt-oss-tiny", "mxfp4"),
    ("glm-tiny", None),
    ("glm-tiny", "4"),
    ("gemma3-tiny", "4"),
]


@pytest.mark.parametrize(("name", "bits"), TINY)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_trial_at_load_accepts_a_random_model(name, bits, dtype):
    if bits is None and dtype == mx.bfloat16:
        pytest.skip("MLX's gather_mm on a CPU computes float32 only")
    assert random_model(name, dtype, bits).packed.by_segment is None


@pytest.mark.parametrize(("name", "bits"), TINY)
def test_context_moves_logits_by_about_their_spread(name, bits):
    model, _ = random_weights(name, mx.float32, bits)
    a, b = (np.array(model(mx.array([[first, 2, 3]]))[0, -1]) for first in (1, 9))
    assert np.isfinite(a).all()
    assert np.std(a - b) > 0.1 * np.std(a)


@pytest.mark.parametrize("bits", BITS)
def test_quantised_values_are_as_large_as_plain_ones(bits):
    name = "gpt-oss-tiny"
    model, config = random_weights(name, mx.float32, bits, hidden_size=256, intermediate_size=256)
    experts = model.layers[0].mlp.experts.up_proj
    how = experts.group_size, experts.bits, experts.mode
    values = mx.dequantize(experts.weight, experts.scales, experts.get("biases"), *how)
    assert float(values.std()) * 16 == pytest.approx(1, rel=0.42 if bits == "mxfp4" else 0.02)
    assert abs(float(values.mean())) < 1e-3
    assert config["quantization"]["mode"] == ("mxfp4" if bits == "mxfp4" else "affine")
