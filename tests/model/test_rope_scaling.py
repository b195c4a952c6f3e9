"""Every kind of rope scaling that mlx-lm knows: packed steps give what mlx-lm gives alone."""

import inspect
import re
from collections import Counter

import numpy as np
import pytest
from mlx_lm.models import rope_utils

from metal.host import installed
from tests.support.kernels.launches import watch
from tests.support.models import tiny_models as tiny
from tests.support.models.bench import MODES, PROMPT_LENGTHS, SEQUENCES, Bench
from tests.support.models.configs import config_of
from tests.support.models.conformance import TOLERANCE, native_logits
from tests.support.models.fused import Fused
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kernels.launch import bits
from vllm_metal_lite.model import loader, trial
from vllm_metal_lite.model.adapters import rotation_limit

TRAINED = 64
_YARN = {
    "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.5,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
_LONG = {"long_factor": [1.5] * 8, "short_factor": [1.0] * 8}
_LONG |= {"original_max_position_embeddings": 16}

# By `initialize_rope`, and by the code of models that do not use it.
KINDS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "yarn": _YARN,
    "deepseek_yarn": _YARN,
    "telechat3-yarn": _YARN,
    "longrope": _LONG,
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
    "mrope": {"mrope_section": [2, 3, 3]},
}  # fmt: skip
MODELS = {
    **{f"llama/{kind}": {"rope_type": kind, **how} for kind, how in KINDS.items()},
    "deepseek/linear": {"type": "linear", "factor": 2.0},
    "deepseek_v2/yarn": {"type": "yarn", **_YARN},
    "deepseek_v3/deepseek_yarn": {"type": "deepseek_yarn", **_YARN},
    "gpt_oss/yarn": {"rope_type": "yarn", **_YARN},
    "hunyuan_v1_dense/alpha": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    "internlm2/dynamic": {"type": "dynamic", "factor": 2.0},
    "internlm2/linear": {"type": "linear", "factor": 2.0},
    "internlm3/dynamic": {"rope_type": "dynamic", "factor": 6.0},
    "minicpm3/longrope": {"type": "longrope", **_LONG, "long_factor": [1.5] * 4},
    "nemotron/linear": {"type": "linear", "factor": 2.0},
    "phi3/linear": {"type": "linear", "factor": 2.0, "long_factor": []},
    "phi3/longrope": {"type": "longrope", **_LONG, "long_factor": [1.5] * 4},  # half of a head
    "phi3/su": {"type": "su", **_LONG},
    "phimoe/longrope": {"type": "longrope", **_LONG, "long_mscale": 1.2, "short_mscale": 1.1},
    "qwen2_moe/linear": {"type": "linear", "factor": 2.0},
    "qwen3/yarn": {"rope_type": "yarn", **_YARN},
}
# They rotate as without: dynamic scaling within the trained context, mrope for text, and what
# mlx-lm takes and ignores.
PLAIN = (
    "llama/default", "llama/dynamic", "llama/mrope", "internlm2/dynamic", "internlm3/dynamic",
    "qwen2_moe/linear",
)  # fmt: skip


def config(name: str, **changes) -> dict:
    module = name.partition("/")[0]
    scaling = {"rope_scaling": MODELS[name], "max_position_embeddings": TRAINED}
    if module == "phi3":
        rotated = len(MODELS[name].get("long_factor", ())) or 8
        scaling |= {"partial_rotary_factor": rotated / 8, "original_max_position_embeddings": 16}
    return {**config_of(module), **scaling, **changes}


def test_every_kind_is_here():
    source = inspect.getsource(rope_utils.initialize_rope)
    compared = re.findall(r"rope_type (?:==|in) ([^:]*):", source)
    assert {kind for text in compared for kind in re.findall(r'"([^"]+)"', text)} == set(KINDS)


@pytest.mark.parametrize("name", MODELS)
def test_packed_steps_give_what_mlx_lm_gives(name):
    model = tiny.build(config(name))
    expected = [native_logits(model, s, n) for s, n in zip(SEQUENCES, PROMPT_LENGTHS, strict=True)]
    if name.partition("/")[0] not in ("deepseek_v2", "minicpm3"):  # which always scale
        plain = native_logits(tiny.build(config(name, rope_scaling=None)), SEQUENCES[2], 30)
        assert bool(np.abs(plain - expected[2]).max() < 1e-4) is (name in PLAIN)
    loaded = loader.from_model(model, None, config(name), name)
    assert loaded.packed.by_segment is None
    scale = max(np.abs(e).max() for e in expected)
    for run in MODES.values():
        for (request, length), logits in run(Bench(loaded)).items():
            error = np.abs(logits - expected[request][length - 1]).max()
            assert error < TOLERANCE * scale, run.__name__


@pytest.fixture
def launches(monkeypatch):
    """Fused launches of rotations, by name and the bits of the factor."""
    found = Counter()

    def count(kernel, _, template):
        name = "fused" if template.get("FUSED") else kernel
        if name in ("fused", "rope_write", "latent_write"):
            found[name, template["FACTOR"]] += 1

    watch(monkeypatch, count)
    return found


def factor_of(model) -> float:
    """What the model's rotations multiply their input by."""
    modules = [m for _, m in model.named_modules()]
    found = {m.mscale for m in modules if hasattr(m, "mscale")}
    found |= {m._scale for m in modules if isinstance(m, rope_utils.SuScaledRoPE)}
    (factor,) = found or {1.0}
    return factor


SCALED = ("gpt_oss/yarn", "qwen3/yarn", "phi3/longrope", "phi3/su", "phimoe/longrope")
SCALED_LATENTS = ("deepseek_v2/yarn", "deepseek_v3/deepseek_yarn", "minicpm3/longrope")


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("name", [*(f"llama/{kind}" for kind in KINDS), *SCALED, *SCALED_LATENTS])
def test_fused_launches_rotate_alike(launches, name, joins):
    loaded = loader.from_model(tiny.build(config(name)), None, config(name), name)
    factor = factor_of(loaded.packed.model)
    assert (factor != 1) is (name in (*SCALED, *SCALED_LATENTS) or "yarn" in name or "long" in name)
    # The checks of kernels try the same factor.
    assert {r.factor for r in loaded.usage.ropes} == {factor}
    model = Fused(loaded, joins=joins)
    with installed():
        assert max(row.error for row in model.rows()) < 1e-4
    assert sum(launches.values()) == len(trial.STEPS) * len(model.layout.specs)
    names = {"latent_write"} if name in SCALED_LATENTS else {"rope_write", "fused"}
    assert set(launches) == {(kernel, bits(factor)) for kernel in names}


@pytest.mark.long
@pytest.mark.parametrize("name", SCALED)
def test_kernels_with_a_factor_give_the_tokens_of_mlx_lm(launches, name):
    """Whole prompts, chunks beside decodes, and decodes."""
    model, prompts = tiny.build(config(name)), tiny.prompts(3, 5, 40)
    loaded = loader.from_model(tiny.build(config(name)), None, config(name), name)
    with installed():
        engine = tiny.engine(loaded, max_num_batched_tokens=24, attention="kernels")
        launches.clear()
        assert tiny.answers(engine, prompts, 8) == tiny.all_alone(model, prompts, 8)
    assert set(launches) == {(kernel, bits(factor_of(model))) for kernel in ("rope_write", "fused")}


@pytest.mark.parametrize("name", ["internlm2/dynamic", "internlm3/dynamic"])
def test_a_base_that_grows_with_each_request_ends_the_context(name):
    """Behind the trained context mlx-lm's own answer depends on how a prompt is cut."""
    model = tiny.build(config(name))
    tokens = tiny.prompts(1, TRAINED + 8, TRAINED + 8)[0]
    whole, halves = (native_logits(model, tokens, n) for n in (len(tokens), TRAINED // 2))
    assert np.abs(whole - halves)[: TRAINED // 2].max() > 0.1
    within = [native_logits(model, tokens[:TRAINED], n) for n in (TRAINED, TRAINED // 2)]
    np.testing.assert_allclose(*within, atol=1e-3)

    loaded = loader.from_model(model, None, config(name, max_position_embeddings=999), name)
    assert (loaded.max_position, loaded.context_guess) == (TRAINED, None)
    with pytest.raises(ConfigError, match=rf"context length, {TRAINED}, got {TRAINED + 1}"):
        tiny.engine(loaded, max_model_len=TRAINED + 1)
    assert rotation_limit(tiny.native("internlm2")) is None
    # The last token that fits is mlx-lm's too.
    engine = tiny.engine(loaded, max_model_len=None)
    prompts = [tokens[: TRAINED - 3]]
    assert tiny.answers(engine, prompts, 3) == tiny.all_alone(model, prompts, 3)
