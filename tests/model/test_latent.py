"""Latent attention: what the store holds, and scores that are computed where their keys are."""

import numpy as np
import pytest

from tests.support import arch_configs
from tests.support import tiny_models as tiny
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.seam.hooks import building
from vllm_metal_lite.model.seam.layer_cache import PagedLayerCache
from vllm_metal_lite.runner.build import choose_attention
from vllm_metal_lite.sampling_params import SamplingParams

HEADS, RANK, ROPE, N = 4, 16, 8, 5
SPEC = LayerSpec(1, RANK, ROPE, mx.float32)


@pytest.fixture
def cache() -> PagedLayerCache:
    inputs = InputBatch(1, 16, 8)
    row = inputs.add(list(range(N)), N)
    inputs.append_blocks(row, [1])
    attention = ReferenceAttention(PagedStore([SPEC], 4, 8))
    step = attention.prepare(inputs.pack(np.array([row]), np.array([0]), np.array([N])), N)
    return PagedLayerCache(0, SPEC, attention.begin(step, attention.new_state()))


def test_scores_are_the_sum_of_both_products(cache):
    """Against the same sums, written out in float64."""
    rng = np.random.default_rng(0)
    latent, k_pe = rng.standard_normal((N, RANK)), rng.standard_normal((N, ROPE))
    q, q_pe = rng.standard_normal((N, HEADS, RANK)), rng.standard_normal((N, HEADS, ROPE))
    scale = 0.3
    keys, rotary = cache.update_and_fetch(
        mx.array(latent[:, None, None], mx.float32), mx.array(k_pe[:, None, None], mx.float32)
    )
    scores = (mx.array(q_pe[:, :, None], mx.float32) * scale) @ rotary.swapaxes(-1, -2)
    with building():
        out = mx.fast.scaled_dot_product_attention(
            mx.array(q[:, :, None], mx.float32), keys, keys, scale=scale, mask=scores
        )
    expected = scale * (np.einsum("nhr,kr->nhk", q, latent) + np.einsum("nhr,kr->nhk", q_pe, k_pe))
    expected = np.where(np.tri(N, dtype=bool)[:, None], expected, -np.inf)
    weights = np.exp(expected - expected.max(-1, keepdims=True))
    expected = (weights / weights.sum(-1, keepdims=True)) @ latent
    np.testing.assert_allclose(np.array(out[:, :, 0]), expected, atol=1e-5)


@pytest.mark.parametrize(
    "use",
    [
        lambda scores, q: mx.eval(scores + q),
        lambda scores, q: mx.eval(mx.softmax(scores, axis=-1) @ q),
        lambda scores, q: mx.eval(mx.where(mx.ones((N, 1, 1, N)) > 0, scores, scores) @ q),
    ],
)
def test_scores_are_good_for_nothing_but_attention(cache, use):
    _, rotary = cache.update_and_fetch(mx.ones((N, 1, 1, RANK)), mx.ones((N, 1, 1, ROPE)))
    q = mx.ones((N, HEADS, 1, ROPE))
    with pytest.raises(ValueError, match="7919"):
        use(q @ rotary.swapaxes(-1, -2), q)


def test_scores_of_another_layer_are_refused(cache):
    other = PagedLayerCache(0, SPEC, cache.attention)
    q = mx.ones((N, HEADS, 1, ROPE))
    scores = q @ other.keys_and_values()[1].swapaxes(-1, -2)
    with pytest.raises(NotImplementedError, match="LatentScores"):
        cache.attend(mx.ones((N, HEADS, 1, RANK)), 1.0, scores)


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "glm4_moe_lite", "kimi_vl", "mistral4", "deepseek_v2", "minicpm3", "youtu_llm"],
)
def test_the_store_holds_one_latent_and_one_rotary_key_a_token(name):
    specs = tiny.packed(name).packed.attention_specs
    assert {(s.num_kv_heads, s.k_head_dim, s.v_head_dim) for s in specs} == {(1, RANK, ROPE)}


def test_up_projections_that_are_quantised_are_absorbed_too():
    """What mlx-lm expands (DeepSeek V2): against mlx-lm on the same packed weights."""
    quantised = arch_configs._q(8) | {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
    config = tiny.config_of("deepseek_v2", **quantised)
    tokens = tiny.prompts(1, 12, 12)[0]
    expected = tiny.logits_alone(tiny.build(config), tokens)[-1]
    engine = LLMEngine(
        loader.from_model(tiny.build(config), None, config, "v2"),
        EngineConfig(num_blocks=4, max_model_len=32),
    )
    assert engine.model.packed.attention_specs[0].k_head_dim == 32
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    engine.add_request("a", tokens, greedy)
    (logprobs,) = tiny.run(engine)["a"].outputs[0].logprobs
    expected = expected - np.log(np.exp(expected).sum())
    for token, logprob in logprobs.items():
        assert logprob.logprob == pytest.approx(expected[token], abs=1e-4)


def test_kernels_leave_latent_attention_to_the_reference(monkeypatch):
    monkeypatch.setattr("vllm_metal_lite.backend.is_cpu", lambda: False)
    model = tiny.packed("deepseek_v3")
    store = PagedStore(model.packed.attention_specs, 4, 8)
    path = choose_attention(model, store, "auto")
    assert type(path.attention) is ReferenceAttention
    assert "latent" in path.reason
    with pytest.raises(ConfigError, match="latent"):
        choose_attention(model, store, "kernels")
