"""Real mlx-lm models of toy size, and mlx-lm's own answers as the oracle.

The weights are random enough that context and order move the logits (`test_conformance` checks it):
with the default initialisation most bugs of attention stay invisible.
"""

import importlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.engine.pool_accounts import check_accounts
from tests.support.kernels.device import RIGHT, pretend_gpu
from tests.support.models.configs import VOCAB, config_of
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import NO_FUSION
from vllm_metal_lite.sampling_params import SamplingParams


def build(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """The mlx-lm module of a configuration, with random weights, quantised where it says so."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = randomize(module.Model(module.ModelArgs.from_dict(config)), seed)
    quantization = config.get("quantization")
    if quantization and "modules" not in config:  # modules: quantised by the module itself
        how = {k: v for k, v in quantization.items() if not isinstance(v, dict | bool)}
        nn.quantize(
            model,
            **how,
            class_predicate=lambda path, m: quantization.get(path, hasattr(m, "to_quantized")),
        )
    mx.eval(model.parameters())
    return model


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that make attention sharp, memory long and tokens varied; norms stay near 1."""
    rng = np.random.default_rng(seed)
    kind = type(model).__module__

    def draw(path: str, x: mx.array) -> mx.array:
        noise = rng.standard_normal(x.shape)
        if x.dtype == mx.uint32:  # packed weights
            return mx.array(rng.integers(0, 1 << 32, x.shape, np.uint32))
        if not mx.issubdtype(x.dtype, mx.floating):
            return x
        centre = next((c for pattern, c in _CENTRES if re.search(pattern, f"{kind}.{path}")), None)
        if centre is not None or x.ndim < 2 or "norm" in path:
            if centre is None:  # gains stay near what they are; biases, drawn by MLX, near 0
                centre = x.reshape(-1)[0].item() if mx.all(x == x.reshape(-1)[0]) else 0.0
            return mx.array(centre + 0.2 * noise, x.dtype)
        fan_in = x.shape[1] if "conv" in path and x.ndim == 3 else x.shape[-1]
        gain = next((g for pattern, g in _GAINS if re.search(pattern, f"{kind}.{path}")), 2.0)
        return mx.array(gain / np.sqrt(fan_in) * noise, x.dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


# What decides how fast a state forgets (slow enough to remember the first token of a test), and
# queries and keys of a fixed length (long enough for sharp attention).
_CENTRES = (
    (r"bailing_moe_v3.*dt_bias", -30.0),
    (r"recurrent_param", -4.0),
    (r"w_lora.*bias", -4.0),
    (r"A_log|dt_bias|dt_proj.bias", -2.0),
    (r"g_norm.weight", 1.0),
    (r"(cohere|talkie).*(q_norm.weight|head_g)$", 3.0),
)
# The usual gain is 2.  Less where a model multiplies its embeddings, or where a product of gates or
# packed weights would drown attention.
_GAINS = (
    (r"(gemma|gear).*embed_tokens", 0.4),
    (r"lfm2.*embed_tokens", 1.0),
    (r"(cohere|spark|step3p5|llama4.|laguna).*down_proj", 0.7),
    (r"lfm2.*(conv.in_proj|lm_head)", 0.7),
    (r"rwkv7.*(ffn.value|r_k)", 0.3),
    (r"prism.*(scales|biases)", 0.04),
)


@cache
def native(name: str) -> nn.Module:
    """The model as mlx-lm runs it, unchanged: the oracle."""
    return build(config_of(name))


def load(
    name: str, dtype: mx.Dtype | None = None, *, how: dict | None = None, **changes
) -> LoadedModel:
    """Make a separate model.  how: options of `from_model`.  changes: new values of the config."""
    config = config_of(name, **changes)
    model = build(config)
    if dtype is not None:
        model.set_dtype(dtype)
    return loader.from_model(model, None, config, name, **(how or {}))


def packed(name: str, dtype: mx.Dtype | None = None) -> LoadedModel:
    """The weights of `native`, perhaps in another dtype, wrapped for packed steps; no tokenizer."""
    return _packed(name, dtype, backend.is_cpu())  # as loaded for such a device


@cache
def _packed(name: str, dtype: mx.Dtype | None, on_cpu: bool) -> LoadedModel:
    return load(name, dtype)


def logits_alone(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    """mlx-lm's logits (len(tokens), V) of one sequence, in one go with its own cache."""
    logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0]
    return np.array(logits.astype(mx.float32))


# By the model's id, which nothing else gets while the model is kept here.
_alone: dict[tuple, tuple[nn.Module, list[int]]] = {}


def alone(model: nn.Module, prompt: Sequence[int], n: int) -> list[int]:
    """n greedy tokens by mlx-lm generating this request alone; remembered."""
    _, known = _alone.setdefault((id(model), *prompt), (model, []))
    if len(known) < n:
        known[:] = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=n)]
    return known[:n]


def engine(
    model: str | LoadedModel = "llama", dtype: mx.Dtype | None = None, **options: Any
) -> LLMEngine:
    """A small engine over a model, or over the tiny one of this name, without drafts, because they
    depend on measured times."""
    loaded = packed(model, dtype) if isinstance(model, str) else model
    defaults = {"block_size": 8, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    longest = min(128, 8 * options.get("num_blocks", 64), loaded.max_position)
    defaults |= {"max_model_len": longest, "speculate": "off"}
    return LLMEngine(loaded, EngineConfig(**{**defaults, **options}))


def engine_with_kernels(name: str, verdict: Verdict = RIGHT, **options: Any) -> LLMEngine:
    """An `engine` that launches kernels, unchecked, on a machine without a GPU (within
    `metal.host.installed`).  Nothing is fused."""
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(patch, verdict)
        patch.setattr(decide, "decide", lambda *_: NO_FUSION)
        return engine(name, **options)


def run_ahead(engine: LLMEngine, ahead: bool) -> LLMEngine:
    """The engine; if not `ahead`, it launches no step before the tokens of the last are known.
    This replaces a private method, since no option turns it off."""
    if not ahead:
        engine._may_run_ahead = lambda output: False
    return engine


def step(engine: LLMEngine, *may_fail: type[BaseException]) -> dict[str, Any]:
    """Run a step, and ignore these errors; returns the finished outputs by request id.  No block
    and no state slot may be lost."""
    done = {}
    with suppress(*may_fail):
        done = {o.request_id: o for o in engine.step() if o.finished}
    reader = getattr(engine.prefix_disk, "reader", None)
    restore = None if reader is None else reader.restore
    requests = [answer.request for answer in engine._answers.values()]
    check_accounts(engine.scheduler.kv, requests, restore)
    return done


def run(engine: LLMEngine, *may_fail: type[BaseException], max_steps: int = 2000) -> dict[str, Any]:
    """Step until nothing is left, see `step`; the finished outputs."""
    done = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return done
        done |= step(engine, *may_fail)
    raise AssertionError(f"requests are left after {max_steps} steps")


def counts(engine: LLMEngine) -> dict[str, int]:
    """The metrics without MLX's memory, which changes while the device finishes a step."""
    return {k: v for k, v in engine.metrics().items() if not k.startswith("memory_")}


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def ask(engine: LLMEngine, prompt: Any, params: SamplingParams, **how: Any) -> Any:
    """Add a request and step until nothing is left; returns its output."""
    engine.add_request("asked", prompt, params, **how)
    return run(engine)["asked"]


Params = SamplingParams | int | Sequence[SamplingParams]


def submit(engine: LLMEngine, prompts: Sequence[Sequence[int]], params: Params, **how: Any) -> None:
    """Add requests named "0", "1", ...

    params: one for all requests, or one for each; a number asks for this number of greedy tokens.
    """
    if isinstance(params, int):
        params = greedy(params, ignore_eos=True)
    each = params if isinstance(params, Sequence) else [params] * len(prompts)
    for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(str(i), prompt, own, **how)


def outputs(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], params: Params, **how: Any
) -> list[Any]:
    """The outputs for these prompts, in order; all requests run together."""
    submit(engine, prompts, params, **how)
    done = run(engine)
    return [done[str(i)] for i in range(len(prompts))]


def tokens_of(outputs: Iterable[Any]) -> list[list[int]]:
    """The tokens of each first answer."""
    return [output.outputs[0].token_ids for output in outputs]


def answers(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], params: Params, **how: Any
) -> list[list[int]]:
    """The tokens of each prompt's first answer; the requests run together."""
    return tokens_of(outputs(engine, prompts, params, **how))


def all_alone(model: str | nn.Module, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """The expected `answers`: `alone` for each prompt, by `native(name)` or the given model."""
    model = native(model) if isinstance(model, str) else model
    return [alone(model, prompt, n) for prompt in prompts]


def prompts(count: int, low: int = 1, high: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts of random lengths in [low, high]."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high + 1)).tolist() for _ in range(count)]


# A model folder on disk, with a tokenizer whose every token is one printable character, so that
# a test can tell by eye what was said; the last ids of the model's vocabulary are padding.
CHARACTERS = [chr(c) for c in range(ord(" "), ord("~") + 1)]
EOS, BOS = len(CHARACTERS), len(CHARACTERS) + 1
_CHAT_TEMPLATE = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ' ' }}{% endfor %}" + (
    "{% if add_generation_prompt %}a:{% endif %}"
)


def _byte_level(character: str) -> str:
    return "Ġ" if character == " " else character


def write_folder(path: Path, name: str = "llama", **changes: Any) -> Path:
    """Write a complete model folder to `path`."""
    path.mkdir(parents=True, exist_ok=True)
    config = config_of(name, eos_token_id=EOS, **changes)
    (path / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(build(config).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    vocab = {_byte_level(c): i for i, c in enumerate(CHARACTERS)} | {"</s>": EOS, "<s>": BOS}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    config |= {"chat_template": _CHAT_TEMPLATE, "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; the value ... deletes a key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))
