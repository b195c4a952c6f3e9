"""Configurations of real models, and of tiny ones of the same form, by name."""

from typing import Any


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
# 16 of the 48 layers of Qwen3-30B-A3B: 8 of 128 experts for each token.
_QWEN3_30B_A3B = {
    **_qwen3(2048, 16, 6144, 32, 4, 128, 151936, 40960), "model_type": "qwen3_moe",
    "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip
# 4 of 32 experts, heads of 64 with sinks, a window of 128 in every second layer.
_GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201088,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
}  # fmt: skip
# 12 of the 47 layers of GLM-4.7-Flash, the first without experts: latent attention (512 + 64).
_GLM_47_FLASH = {
    "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 20,
    "num_key_value_heads": 20, "n_shared_experts": 1, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "kv_lora_rank": 512,
    "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "vocab_size": 154880, "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
# Norms before and after, heads of 256, a window of 1,024 in five of six layers.
_GEMMA3_4B = {
    "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
    "vocab_size": 262208, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
_TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 32768,
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
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-moe-tiny": {
        **_QWEN3_30B_A3B, **_TINY, "num_hidden_layers": 2, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 64,
    },
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-tiny": {
        **_GPT_OSS_20B, **_TINY, "num_hidden_layers": 4, "num_local_experts": 8,
        "intermediate_size": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm-4.7-flash": _GLM_47_FLASH,
    "glm-tiny": {
        **_GLM_47_FLASH, **_TINY, "num_hidden_layers": 3, "num_key_value_heads": 4,
        "n_routed_experts": 16, "moe_intermediate_size": 64, "kv_lora_rank": 64,
        "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 64, "v_head_dim": 64,
    },
    "gemma3-4b": _GEMMA3_4B,
    "gemma3-tiny": {
        **_GEMMA3_4B, **_TINY, "num_hidden_layers": 6, "query_pre_attn_scalar": 16,
        "sliding_window": 32, "sliding_window_pattern": 3,
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
