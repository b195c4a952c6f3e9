"""Real mlx-lm models of toy size, and mlx-lm's own answers as the oracle.

The weights are random enough that context and order move the logits by about their own scale
(`test_models` checks it): with the default initialisation most bugs of attention stay invisible.
"""

import importlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.model import loader
from vllm_metal_lite.model.loader import LoadedModel

VOCAB = 101
WINDOW = 9

_BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOWS = {"sliding_window": WINDOW, "sliding_window_pattern": 2}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_MIXED = {"sliding_window": WINDOW, "layer_types": _LAYERS}
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}

# Our name -> the mlx-lm module, and what differs from _BASE.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_window": ("llama", _MIXED),
    "llama3_rope": ("llama", {"rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("gemma3_text", {**_WINDOWS, "query_pre_attn_scalar": 16}),
    "gemma4_shared_kv": ("gemma4_text", {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW, "global_head_dim": 32, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}),
    "gpt2": ("gpt2", {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512,
                      "layer_norm_epsilon": 1e-5}),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5}),
    "phi3": ("phi3", {}),
    "glm": ("glm", {"partial_rotary_factor": 0.5}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", {**_MOE, "sliding_window": WINDOW, "num_hidden_layers": 4}),
    "mimo_v2_flash": ("mimo_v2_flash", {  # values narrower than keys, sinks in window layers
        "num_experts_per_tok": 2, "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1],
        "sliding_window_size": WINDOW, "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "moe_intermediate_size": 48, "n_shared_experts": 1,
        "n_routed_experts": 4, "routed_scaling_factor": None, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
        "layernorm_epsilon": 1e-5, "swa_rope_theta": 8000, "head_dim": 32, "v_head_dim": 16,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
        "swa_v_head_dim": 16, "partial_rotary_factor": 0.5}),
    "mixtral": ("mixtral", _MOE),
    "qwen3_moe": ("qwen3_moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "ministral3": ("ministral3", {**_MIXED, "rope_parameters": {
        **_ROPE, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}}),
    "cohere2": ("cohere2", {**_WINDOWS, "logit_scale": 1.0}),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {}),
}  # fmt: skip


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights that make attention sharp and tokens varied; norms stay near what they were."""
    rng = np.random.default_rng(seed)
    # Gemma multiplies its embeddings: as large as that, a token would only ever repeat itself.
    embedding_gain = 0.2 if "gemma" in type(model).__module__ else 1.0

    def draw(path: str, x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating):
            return x
        noise = rng.standard_normal(x.shape)
        if x.ndim == 1:
            # Ones stay near 1; biases, drawn by MLX when the model was made, near 0.
            return mx.array(np.round(np.array(x)) + 0.2 * noise, x.dtype)
        gain = embedding_gain if "embed_tokens" in path else 1.0
        return mx.array(gain * 2.0 / np.sqrt(x.shape[-1]) * noise, x.dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    module, extra = ARCHITECTURES[name]
    return {**_BASE, "model_type": module, **extra, **changes}


def build(config: dict[str, Any], seed: int = 0) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return randomize(module.Model(module.ModelArgs.from_dict(config)), seed)


@cache
def native(name: str) -> nn.Module:
    """The model as mlx-lm runs it, never touched by us: the oracle."""
    return build(config_of(name))


@cache
def packed(name: str) -> LoadedModel:
    """The same weights, wrapped for packed steps; no tokenizer."""
    config = config_of(name)
    return loader.from_model(build(config), None, config, name)


def logits_alone(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    """mlx-lm's logits (len(tokens), V) of one sequence, in one go with its own cache."""
    logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0]
    return np.array(logits.astype(mx.float32))


_alone: dict[tuple, list[int]] = {}


def alone(model: nn.Module, prompt: Sequence[int], n: int) -> list[int]:
    """n greedy tokens by mlx-lm generating this request alone; remembered."""
    known = _alone.setdefault((id(model), *prompt), [])
    if len(known) < n:
        known[:] = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=n)]
    return known[:n]


def engine(name: str = "llama", **options: Any) -> LLMEngine:
    """A small engine over the tiny model `name`."""
    defaults = {
        "block_size": 8, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "max_model_len": min(128, 8 * options.get("num_blocks", 64)),
    }  # fmt: skip
    return LLMEngine(packed(name), EngineConfig(**{**defaults, **options}))


def run(engine: LLMEngine, max_steps: int = 2000) -> dict[str, Any]:
    """Step until nothing is left; the finished outputs by request id."""
    done = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return done
        done |= {o.request_id: o for o in engine.step() if o.finished}
    raise AssertionError(f"requests are left after {max_steps} steps")


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
    (path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>",
        "chat_template": _CHAT_TEMPLATE, "clean_up_tokenization_spaces": False,
    }))  # fmt: skip
    return path
