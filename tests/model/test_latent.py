"""Latent attention: what the store holds, and scores that are computed where their keys are."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from metal.host import installed
from tests.support.attention.cases import PREFILLS, begin
from tests.support.engine.batches import pack
from tests.support.kernels.device import change_device, pretend_gpu
from tests.support.kernels.launches import watch
from tests.support.models import configs as arch_configs
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.assembly import choose_attention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.model.seam.hooks import building
from vllm_metal_lite.model.seam.layer_cache import PagedLayerCache
from vllm_metal_lite.runner.compiled import CompiledSteps
from vllm_metal_lite.sampling_params import SamplingParams

HEADS, RANK, ROPE, N = 4, 16, 8, 5
SPEC = LayerSpec(1, RANK, ROPE, mx.float32)


@pytest.fixture
def cache() -> PagedLayerCache:
    attention = ReferenceAttention(PagedStore([SPEC], 4, 8))
    return PagedLayerCache(0, begin(attention, pack([(0, N)], [[1]]), N))


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
    other = PagedLayerCache(0, cache.attention)
    q = mx.ones((N, HEADS, 1, ROPE))
    scores = q @ other.keys_and_values()[1].swapaxes(-1, -2)
    with pytest.raises(NotImplementedError, match="LatentScores"):
        cache.attend(mx.ones((N, HEADS, 1, RANK)), 1.0, scores)


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "glm4_moe_lite", "kimi_vl", "mistral4", "deepseek_v2", "minicpm3", "youtu_llm"],
)
def test_the_store_holds_one_latent_and_one_rotary_key_a_token(name):
    specs = tiny.packed(name).packed.layout.specs
    assert {(s.num_kv_heads, s.k_head_dim, s.v_head_dim) for s in specs} == {(1, RANK, ROPE)}


def test_up_projections_that_are_quantised_are_absorbed_too():
    """What mlx-lm expands (DeepSeek V2): against mlx-lm on the same packed weights."""
    quantised = arch_configs._q(8) | {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
    config = tiny.config_of("deepseek_v2", **quantised)
    tokens = tiny.prompts(1, 12, 12)[0]
    expected = tiny.logits_alone(tiny.build(config), tokens)[-1]
    model = tiny.load("deepseek_v2", **quantised)
    engine = tiny.engine(model)
    assert engine.model.packed.layout.specs[0].k_head_dim == 32
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    (logprobs,) = tiny.ask(engine, tokens, greedy).outputs[0].logprobs
    expected = expected - np.log(np.exp(expected).sum())
    for token, logprob in logprobs.items():
        assert logprob.logprob == pytest.approx(expected[token], abs=1e-4)


# Through kernels, on the CPU host

# Heads for more than a tile, latents that are scaled, YaRN, quantised up-projections, and models
# that mlx-lm expands.
THROUGH_KERNELS = (
    "deepseek_v3", "glm4_moe_lite", "kimi_vl", "deepseek_v2", "minicpm3", "youtu_llm",
)  # fmt: skip


@contextmanager
def kernels(name: str, prefill: str, *failed: str, **options: Any) -> Iterator[LLMEngine]:
    """failed: kernels that are not used."""
    with installed():
        verdict = Verdict(dict.fromkeys(failed, "wrong"), prefill)
        engine = tiny.engine_with_kernels(name, verdict, **options)
        assert isinstance(engine.runner.attention, KernelAttention)
        yield engine


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("name", THROUGH_KERNELS)
def test_kernels_give_the_tokens_of_mlx_lm(name, prefill):
    """Whole prompts, chunks beside decodes, and decodes."""
    prompts = tiny.prompts(4, 5, 40)
    with kernels(name, prefill, max_num_batched_tokens=24) as engine:
        assert tiny.answers(engine, prompts, 12) == tiny.all_alone(name, prompts, 12)


@pytest.mark.parametrize("prefill", PREFILLS)
def test_prompts_without_rows_as_decodes(prefill, monkeypatch):
    change_device(monkeypatch, rows_as_decodes=0, small_rows=0)
    prompts = tiny.prompts(4, 5, 40)
    with kernels("glm4_moe_lite", prefill, max_num_batched_tokens=24) as engine:
        assert tiny.answers(engine, prompts, 6) == tiny.all_alone("glm4_moe_lite", prompts, 6)


def test_preempted_requests_and_cached_prefixes():
    """Blocks for two of four requests; then the same prompts, whose whole blocks are known."""
    prompts = tiny.prompts(4, 30, 40)
    expected = tiny.all_alone("deepseek_v3", prompts, 20)
    with kernels("deepseek_v3", "varlen", num_blocks=13, block_size=8, max_model_len=64) as engine:
        assert tiny.answers(engine, prompts, 20) == expected
        assert tiny.answers(engine, prompts, 20) == expected
        assert engine.scheduler.num_preemptions


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_latents_give_the_references_tokens(bits):
    prompts = tiny.prompts(3, 5, 40)
    expected = tiny.answers(tiny.engine("deepseek_v3", kv_bits=bits), prompts, 12)
    for prefill in PREFILLS:
        with kernels("deepseek_v3", prefill, kv_bits=bits) as engine:
            assert tiny.answers(engine, prompts, 12) == expected


# Of mistral4 and longcat_flash, which scale what they write, norm and rotation stay MLX's.
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize(
    ("name", "write"),
    [("deepseek_v3", "latent_write"), ("deepseek_v3/yarn", "latent_write"),
     ("minicpm3", "latent_write"), ("mistral4", "kv_write"), ("longcat_flash", "kv_write")],
)  # fmt: skip
def test_norm_rotations_and_write_are_one_launch(monkeypatch, name, write, bits):
    launched = Counter()
    watch(monkeypatch, lambda kernel, *_: launched.update([kernel]))
    pretend_gpu(monkeypatch, Verdict({}, "varlen"))
    prompts = tiny.prompts(3, 5, 30)
    reference = tiny.engine(name, kv_bits=bits, attention="reference")
    expected = tiny.answers(reference, prompts, 8)
    with installed():
        engine = tiny.engine(name, kv_bits=bits, max_num_batched_tokens=24)
        launched.clear()
        assert tiny.answers(engine, prompts, 8) == expected
    writes = {"latent_write", "kv_write", "kv_write_quantised"} & launched.keys()
    quantised = bits is not None and write == "kv_write"
    assert writes == {"kv_write_quantised" if quantised else write}
    assert launched["latent_attention"] == launched[next(iter(writes))]


@pytest.mark.parametrize("failed", ["latent_attention", "latent_prefill"])
def test_without_the_kernel_the_store_is_gathered(failed):
    prompts = tiny.prompts(3, 5, 40)
    with kernels("deepseek_v3", "varlen", failed) as engine:
        assert engine.runner.attention.prefill == "gather"
        assert tiny.answers(engine, prompts, 8) == tiny.all_alone("deepseek_v3", prompts, 8)


def test_steps_of_latents_are_compiled(monkeypatch):
    pretend_gpu(monkeypatch, Verdict({}, "varlen"))
    model = tiny.packed("deepseek_v3")
    store = PagedStore(model.packed.layout.specs, 4, 8)
    path = choose_attention(model, store, "kernels")
    assert "latent_attention" in path.reason
    assert CompiledSteps(model.packed, path.attention).reason is None
