"""Models of the serving benchmarks: random weights at the sizes of real ones, made in memory."""

import math
from importlib import import_module
from typing import Any

from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.model.loader import LoadedModel, from_model, load

# isort: split
import mlx.nn as nn
from mlx.utils import tree_map_with_path

mx = backend.mx


def _qwen3(
    hidden: int, layers: int, inner: int, heads: int, kv: int, dim: int, vocab: int, context: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


# Gated DeltaNet in three of four layers, attention with a gate in the fourth.
_QWEN3_5_4B = {
    "model_type": "qwen3_5", "hidden_size": 2560, "num_hidden_layers": 32,
    "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "vocab_size": 248320, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
# Short convolutions in ten layers, attention in six; the MLP's inner size becomes 8,192.
_LFM2_12B = {
    "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 128000,
    "norm_eps": 1e-5, "rope_theta": 1e6, "conv_bias": False, "conv_L_cache": 3,
    "block_dim": 2048, "block_ff_dim": 12288, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}  # fmt: skip
# Nemotron-H-4B: Mamba 2 in 24 blocks, attention without rotations in 4, an MLP in 24.
_NEMOTRON_H_4B = {
    "model_type": "nemotron_h", "hidden_size": 3072, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
    "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 112,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "hybrid_override_pattern": list("M-M-M-M*" + "-M-M-M-M-M*" * 3 + "-M-M-M-M-M-"),
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "mamba_proj_bias": False,
    "use_conv_bias": True,
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 8192,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 28, 3072, 16, 8, 128, 151936, 40960),
    "qwen3-4b": _qwen3(2560, 36, 9728, 32, 8, 128, 151936, 40960),
    "qwen3.5-4b": _QWEN3_5_4B,
    "qwen3.5-tiny": {
        **_QWEN3_5_4B, **_TINY, "num_hidden_layers": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "lfm2-1.2b": _LFM2_12B,
    "lfm2-tiny": {
        **_LFM2_12B, **_TINY, "num_hidden_layers": 4, "block_dim": 64, "block_ff_dim": 192,
        "block_multiple_of": 16, "full_attn_idxs": [1, 3],
    },
    "nemotron-h-4b": _NEMOTRON_H_4B,
    "nemotron-h-tiny": {
        **_NEMOTRON_H_4B, **_TINY, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 2, "hybrid_override_pattern": list("M-M*M-"),
    },
}  # fmt: skip


def random_config(name: str) -> dict[str, Any]:
    """A key of SHAPES, or HIDDENxLAYERS: qwen3, heads of 64, two a KV head, vocabulary 8,192."""
    if name in SHAPES:
        return SHAPES[name]
    hidden, layers = map(int, name.split("x"))
    return _qwen3(
        hidden, layers, 3 * hidden, hidden // 64, max(hidden // 128, 1), 64, 8192, 8192
    )  # fmt: skip


def _fill(path: str, w: mx.array, dtype: mx.Dtype) -> mx.array:
    """Random values for the parameter at `path`."""
    match path.rpartition(".")[2]:
        case "A_log":  # Mamba's start: decays exp(-a dt) for a from 1 to 16 ...
            return mx.log(mx.random.uniform(1, 16, w.shape))
        case "dt_bias":  # ... and dt from 0.001 to 0.1, which is the softplus of its bias
            dt = mx.exp(mx.random.uniform(math.log(1e-3), math.log(0.1), w.shape))
            return (dt + mx.log(-mx.expm1(-dt))).astype(dtype)
        case "bias":
            return mx.zeros(w.shape, dtype)
    if w.ndim < 2:
        return mx.ones(w.shape, dtype)
    inputs = math.prod(w.shape[1:])
    return mx.random.normal(w.shape, dtype, scale=inputs**-0.5)


def random_model(
    name: str, dtype: mx.Dtype = mx.float32, bits: int | None = None, **changes: Any
) -> LoadedModel:
    """`random_config` with random weights, made in memory; changes: other values of the config.

    Matrices are normal with variance 1 / inputs and norms 1, so that context and order move the
    logits by about their own spread.  Recurrent layers remember one to a thousand tokens, and their
    states stay finite.  bits: quantised, 64 weights a scale.
    """
    config = {**random_config(name), **changes}
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(0)
    parameters = tree_map_with_path(lambda path, w: _fill(path, w, dtype), model.parameters())
    model.update(parameters)
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    model.eval()  # mlx-lm's recurrent layers have no kernels in training
    mx.eval(model.parameters())
    suffix = f", {bits} bit" if bits else ""
    return from_model(model, None, config, name=f"{name} {str(dtype).split('.')[-1]}{suffix}")


def get_model(name: str, dtype: str = "auto", bits: int | None = None) -> LoadedModel:
    """Random weights for what `random_config` knows; anything else is loaded by name."""
    is_shape = name in SHAPES or name.replace("x", "", 1).isdigit()
    if not is_shape:
        if bits:
            raise MetalLiteError(f"--bits {bits} is for random weights, and {name!r} is a model")
        return load(name, dtype)
    if dtype == "auto":
        dtype = "float32" if backend.is_cpu() else "bfloat16"
    return random_model(name, getattr(mx, dtype), bits)
