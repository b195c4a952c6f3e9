"""A tiny configuration of every architecture of mlx-lm.

A name is the mlx-lm module, with "/variant" behind it where one configuration does not show all
that a module can do.  Windows, chunks and sparse choices are shorter than the sequences of the
tests, but longer than the trial by which the loader chooses how to run a model, as real ones are.
Each window is run once more at 9 tokens.
"""

from typing import Any

VOCAB = 101
WINDOW, NARROW = 17, 9

# Names of one thing in many modules: a module takes the keys it knows and leaves the others.
# Tables, several entries a line.
# fmt: off
_BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rope_theta": 1e4, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qk_norm": True,
    "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.5,
}
_MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "num_shared_experts": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 64, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12,
}
_INDEXER = {"index_head_dim": 24, "index_n_heads": 2, "index_topk": 16}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_MIXED = {"sliding_window": WINDOW, "layer_types": _LAYERS}
_WINDOWS = {"sliding_window": WINDOW, "sliding_window_pattern": 2}
_ROPE = {"rope_theta": 1e4, "rope_type": "default"}
_ROPES = {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}}
_YARN = {"rope_scaling": {
    "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}}
_GRANITE = {"logits_scaling": 2.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.5,
            "residual_multiplier": 0.8}
_LLAMA4_SCALING = {"rope_parameters": {
    **_ROPE, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}}
_LONGCAT = {
    **_MLA, "ffn_hidden_size": 96, "moe_topk": 2, "expert_ffn_hidden_size": 48,
    "n_routed_experts": 4, "zero_expert_num": 2, "num_layers": 2, "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 512, "n_ctx": 512,
        "rotary_dim": 8}
_DELTA = {  # Gated DeltaNet
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4,
    "full_attention_interval": 2,
}
_MAMBA = {
    "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_ssm": 128, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "state_size": 16, "conv_kernel": 4, "n_groups": 2,
    "mamba_proj_bias": False, "mamba_conv_bias": True, "use_conv_bias": True,
    "time_step_rank": 8, "num_heads": 8, "time_step_limit": [0.001, 10.0],
}
_KDA = {"linear_attn_config": {
    "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16,
    "short_conv_kernel_size": 4}, "num_hidden_layers": 4,
    "num_experts_per_token": 2, "mla_use_nope": True}
_SINKS = {  # values narrower than keys, sinks in window layers
    **_MOE, "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1],
    "sliding_window_size": WINDOW, "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False, "routed_scaling_factor": None, "swa_rope_theta": 8000,
    "head_dim": 32, "v_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 16,
}
_GEMMA4 = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW, "global_head_dim": 32, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
}
_GEAR = {
    "num_hidden_layers": 4,
    "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
    "sliding_window": WINDOW,
}

_LFM2 = {"conv_bias": True, "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 16,
         "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
         "block_ff_dim": 96, "full_attn_idxs": [1, 3], "num_hidden_layers": 4,
         "tie_word_embeddings": True}
_MINIMAX = {
    **_MOE, "moe_layer_freq": [0, 1, 1], "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
}
_SPARSE = {
    **_MINIMAX, "index_n_heads": 2, "index_head_dim": 16, "index_topk_blocks": 2,
    "layer_types": ["full_attention", "sparse", "sparse"],
}
# fmt: on


def _q(bits: int, mode: str = "affine", group_size: int = 32, **layers: Any) -> dict[str, Any]:
    """Quantised weights, as a model folder's config.json says it; `layers` differ from the rest."""
    return {"quantization": {"bits": bits, "group_size": group_size, "mode": mode, **layers}}


def _text(**changes: Any) -> dict[str, Any]:
    """A multimodal wrapper, whose text model has a configuration of its own."""
    return {"text_config": {**_BASE, "model_type": "text", **changes}}


# fmt: off
CONFIGS: dict[str, dict[str, Any]] = {
    # Plain attention, one K and V a layer.
    "apertus": {"post_norm": False, "qk_norm": True},
    "cohere": {"logit_scale": 0.5},
    "ernie4_5": {},
    "exaone": {"num_layers": 3},
    "gemma": {},
    "glm": {},
    "glm4": {"attention_bias": True},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": _GPT,
    "granite": _GRANITE,
    "helium": {},
    "hunyuan_v1_dense": {},
    "internlm2": {},
    "internlm2/dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "internlm3": {},
    "internlm3/dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
    "lille-130m": {**_GPT, "n_kv_heads": 2, "block_size": 512},
    "llama": {},
    "llama/llama3_rope": {"rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}},
    "llama/yarn": _YARN,
    "llama/q4": _q(4),
    "llama/q6": _q(6),
    "llama/q8": _q(8),
    "llama/mxfp4": _q(4, "mxfp4"),
    "llama/mixed": _q(4, **{"model.layers.1.self_attn.v_proj": {"bits": 6, "group_size": 32},
                            "lm_head": {"bits": 8, "group_size": 64},
                            "model.layers.0.mlp.down_proj": False}),
    "mimo": {},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0},
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}}]},
    "olmo": {},
    "olmo2": {},
    "openelm": {"num_transformer_layers": 2, "model_dim": 64, "ffn_dim_divisor": 16,
                "num_query_heads": [4, 4], "num_kv_heads": [2, 2], "ffn_multipliers": [1.0, 2.0]},
    "phi": {},
    "phi3": {},
    # Its head blanks fixed tokens of the real vocabulary.
    "phi3small": {"vocab_size": 100352, "dense_attention_every_n_layers": 2,
                  "ff_intermediate_size": 96, "gegelu_limit": 20.0, "blocksparse_block_size": 32,
                  "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 2},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16, "num_attention_heads": 4},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {},
    "talkie": {},
    "telechat3": {},
    # Mixtures of experts over plain attention.
    "Klear": _MOE,
    "bailing_moe": {**_MOE, "topk_group": 1},
    "dbrx": {"d_model": 64, "n_layers": 3, "n_heads": 4,
             "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek": _MOE,
    "dots1": _MOE,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48,
                     "moe_num_shared_experts": 1},
    "glm4_moe": {**_MOE, "rope_scaling": None},
    "granitemoe": {**_MOE, **_GRANITE},
    "hunyuan": {**_MOE, "num_hidden_layers": 4, "moe_topk": 2, "num_shared_expert": 1,
                "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
                "rope_scaling": {"type": "dynamic", "alpha": 4.0, "factor": 1.0}},
    "llama4_text": {**_MOE, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0, 1],
                    "num_key_value_heads": 2},
    "minimax": {**_MOE, "shared_intermediate_size": 48, "rotary_dim": 8},
    "mixtral": _MOE,
    "mixtral/q4": {**_MOE, **_q(4)},
    "olmoe": _MOE,
    "phimoe": {**_MOE, "rope_scaling": {
        "type": "longrope", "long_factor": [1.5] * 8, "short_factor": [1.0] * 8,
        "long_mscale": 1.2, "short_mscale": 1.1, "original_max_position_embeddings": 16}},
    "phixtral": {**_MOE, "num_vocab": VOCAB, "model_dim": 64, "num_heads": 4, "num_layers": 3,
                 "rotary_dim": 8},
    "qwen2_moe": _MOE,
    "qwen3_moe": _MOE,
    "qwen3_moe/mxfp4": {**_MOE, **_q(4, "mxfp4")},
    "solar_open": _MOE,
    # Some layers see a window.
    "afmoe": {**_MOE, **_MIXED, "num_dense_layers": 1},
    "cohere2": {**_WINDOWS, "logit_scale": 0.5},
    "exaone4": {**_WINDOWS, "sliding_window_pattern": "LGL", "rope_scaling": None},
    "exaone_moe": {**_MOE, **_MIXED, "is_moe_layer": [False, True, True]},
    "gemma2": {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 16},
    "gpt_oss": {**_MOE, "sliding_window": WINDOW, "num_hidden_layers": 4},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "laguna": {**_MOE, **_MIXED, **_ROPES, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "llama/window": _MIXED,
    "llama/window_of_a_block": {**_MIXED, "sliding_window": 8},
    "mellum": {**_MOE, **_MIXED, **_ROPES},
    "mimo_v2_flash": _SINKS,
    "ministral3": {**_MIXED, **_LLAMA4_SCALING},
    "muse_glimmer": {**_MIXED, "output_multiplier": 1.0},
    "muse_spark": _text(**_MIXED, num_local_experts=4, num_experts_per_tok=2,
                        moe_intermediate_size=48, moe_hidden_size=64, post_norm_eps=1e-5,
                        rope_parameters=_ROPE, layer_rope_theta=[1e4, 0, 1e4],
                        final_logit_softcapping=20.0, output_multiplier=1.0),
    "olmo3": _MIXED,
    "plamo3": {**_WINDOWS, "window_size": WINDOW},
    "spark2_5": {**_MIXED, **_ROPES},
    "step3p5": {**_MIXED, "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2,
                "moe_intermediate_size": 48, "share_expert_dim": 48,
                "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2}},
    # Layers that attend to an earlier layer's K and V.
    "afm7": {"hidden_dim": 64, "num_layers": 3, "num_kv_reuse_layers": 2, "num_heads": 4,
             "num_kv_heads": 2},
    "gemma3n": _text(
        **_MIXED, num_kv_shared_layers=1, vocab_size_per_layer_input=VOCAB,
        rope_local_base_freq=8e3, final_logit_softcapping=30.0, hidden_size_per_layer_input=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0], altup_num_inputs=2, altup_coef_clip=120.0,
        altup_correct_scale=True, altup_active_idx=0, laurel_rank=8),
    "gemma4_text": _GEMMA4,
    "gemma4_text/shared_kv": {**_GEMMA4, "num_kv_shared_layers": 2},
    "gemma4_text/moe": {**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                        "moe_intermediate_size": 48, "attention_k_eq_v": True,
                        "num_global_key_value_heads": 1},
    # Chunked attention.
    "llama4": _text(
        num_local_experts=4, num_experts_per_tok=1, model_type="llama4_text", rope_scaling=None,
        attention_chunk_size=WINDOW, interleave_moe_layer_step=2, intermediate_size_mlp=64,
        attn_temperature_tuning=True, floor_scale=7, attn_scale=0.5,
        num_hidden_layers=4),
    # Latent attention.
    "deepseek_v2": {**_MOE, **_MLA, **_YARN, "topk_method": "greedy"},
    "deepseek_v3": {**_MOE, **_MLA},
    "deepseek_v3/yarn": {**_MOE, **_MLA, **_YARN},
    "deepseek_v3/q4": {**_MOE, **_MLA, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32,
                       "qk_nope_head_dim": 32, **_q(4)},
    "glm4_moe_lite": {**_MOE, **_MLA},
    "longcat_flash": {**_LONGCAT, "attention_method": "MLA", "zero_expert_type": "identity"},
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2},
    "minicpm3": {**_MLA, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0,
                 "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 4,
                                  "short_factor": [1.0] * 4,
                                  "original_max_position_embeddings": 16}},
    "mistral4": {**_MOE, **_MLA, **_LLAMA4_SCALING},
    "youtu_llm": _MLA,
    # Sparse attention, chosen by an indexer.
    "deepseek_v32": {**_MOE, **_MLA, **_INDEXER},
    "deepseek_v32/top8": {**_MOE, **_MLA, **_INDEXER, "index_topk": 8},
    "deepseek_v32/top_all": {**_MOE, **_MLA, **_INDEXER, "index_topk": 256},
    "deepseek_v41": {**_MOE, "q_lora_rank": 24, "qk_rope_head_dim": 8, "head_dim": 32,
                     "o_groups": 2, "o_lora_rank": 16, "num_hidden_layers": 4,
                     "sliding_window": WINDOW, "compress_ratios": [0, 4, 4, 4],
                     "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3],
                     "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4,
                     "candidate_source_layer_id": 1, "candidate_topk_blocks": 2,
                     "candidate_block_size": 2, "hc_mult": 2, "hc_sinkhorn_iters": 4,
                     "rms_norm_eps": 1e-6, "moe_layer_freq": 1},
    "glm_moe_dsa": {**_MOE, **_MLA, **_INDEXER, "rope_parameters": _ROPE},
    "minimax_m3_vl": _text(**_MINIMAX),
    "minimax_m3_vl/sparse": _text(**_SPARSE, index_block_size=8),
    "minimax_m3_vl/sparse_of_4": _text(**_SPARSE, index_block_size=4),
    # Recurrent: Mamba, RWKV.
    "mamba": {**_MAMBA, "intermediate_size": 128, "use_bias": True},
    "mamba/bcdt_rms": {**_MAMBA, "intermediate_size": 128, "use_bcdt_rms": True},
    "mamba2": {**_MAMBA, "intermediate_size": 128, "layer_norm_epsilon": 1e-5},
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
              "decay_low_rank_dim": 8},
    # Recurrent layers among attention layers.
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2,
                    "num_swa_attention_heads": 8, "num_swa_key_value_heads": 4},
    "bailing_hybrid": {**_MOE, **_MLA, "num_hidden_layers": 4, "layer_group_size": 2,
                       "group_norm_size": 2},
    "bailing_moe_linear": {**_MOE, "num_hidden_layers": 4, "layer_group_size": 2,
                           "group_norm_size": 2},
    "bailing_moe_v3": {**_MOE, **_MLA, "num_hidden_layers": 4, "layer_group_size": 2,
                       "moe_shared_expert_intermediate_size": 48},
    "falcon_h1": {**_MAMBA, "mlp_multipliers": [1.0, 1.0], "lm_head_multiplier": 1.0,
                  "ssm_multipliers": [1.0] * 5, "embedding_multiplier": 1.0},
    "gear": _GEAR,
    "gear/softcap": {**_GEAR, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    "granitemoehybrid": {**_MOE, **_MAMBA, **_GRANITE, "num_hidden_layers": 4,
                         "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48},
    "jamba": {**_MOE, **_MAMBA, "num_hidden_layers": 4, "attn_layer_offset": 1,
              "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": _text(**_MOE, **_MLA, **_KDA),
    "kimi_linear": {**_MOE, **_MLA, **_KDA, "model_max_length": 512},
    "lfm2": _LFM2,
    "lfm2_moe": {**_MOE, "conv_bias": True, "conv_L_cache": 3, "use_expert_bias": True,
                 "num_dense_layers": 1, "full_attn_idxs": [1, 3], "num_hidden_layers": 4},
    "nemotron_h": {**_MOE, **_MAMBA, "hybrid_override_pattern": list("M*E-M*"),
                   "moe_shared_expert_intermediate_size": 48},
    "olmo_hybrid": {**_DELTA, "linear_allow_neg_eigval": True,
                    "layer_types": ["linear_attention", "full_attention"] * 2},
    "plamo2": {**_MAMBA, "num_hidden_layers": 4, "hidden_size_per_head": 16, "mamba_step": 2},
    "qwen3_5": _text(**_DELTA),
    "qwen3_5/tied": _text(**_DELTA, tie_word_embeddings=True),
    "qwen3_next": {**_MOE, **_DELTA},
    "qwen3_next/q4": {**_MOE, **_DELTA, **_q(4)},
    "recurrent_gemma": {"conv1d_width": 4, "logits_soft_cap": 30.0, "num_key_value_heads": 1,
                        "attention_window_size": WINDOW - 3,  # leaves a block within another
                        "block_types": ["recurrent", "recurrent", "attention"]},
    # Multimodal wrappers and conversions: their text path.
    "gemma3": _text(**_WINDOWS, model_type="gemma3_text", query_pre_attn_scalar=16),
    "gemma4": _text(**_GEMMA4, model_type="gemma4_text"),
    "kimi_k25": _text(**_MOE, **_MLA),
    "kimi_vl": _text(**_MOE, **_MLA),
    "lfm2-vl": _text(model_type="lfm2", **_LFM2),
    "mistral3": _text(model_type="llama"),
    "mistral3/ministral3": _text(model_type="ministral3", **_MIXED, **_LLAMA4_SCALING),
    "pixtral": _text(model_type="llama"),
    "prism_hadamard_qwen35": {
        **_text(model_type="qwen3_5", **_DELTA, intermediate_size=512, hidden_size=128),
        "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": f"model.layers.{i}.mlp.down_proj", "block": 512, "embedding": False,
             "dtype": "float16"} for i in range(4)]},
    "qwen2_vl": _text(model_type="qwen2"),
    "qwen3_5_moe": _text(**_MOE, **_DELTA),
    "qwen3_vl": _text(model_type="qwen3"),
    "qwen3_vl_moe": _text(model_type="qwen3_moe", **_MOE),
    # 1.58-bit weights.
    "bitnet": {},
}

_WINDOW_KEYS = {
    "sliding_window", "sliding_window_size", "window_size", "loop_window_size",
    "attention_window_size", "attention_chunk_size",
}
# fmt: on


def _narrow(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with every window of WINDOW tokens made one of NARROW."""
    narrow = {k: _narrow(v) for k, v in config.items() if isinstance(v, dict)}
    return config | narrow | {k: NARROW for k in _WINDOW_KEYS if config.get(k) == WINDOW}


CONFIGS |= {f"{n}/w{NARROW}": _narrow(c) for n, c in CONFIGS.items() if _narrow(c) != c}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The configuration `name` as a model folder's config.json would have it."""
    return {**_BASE, "model_type": name.split("/")[0], **CONFIGS[name], **changes}


# Files of mlx_lm/models that are no models.
# fmt: off
HELPERS = {
    "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline",
    "rope_utils", "ssm", "switch_layers",
}
# fmt: on

# What mlx-lm by itself cannot run here; on a machine where it can, it must conform.
CANNOT_RUN = {
    "bitnet": "its matrix multiplications are a Metal kernel",
    "muse_spark": "its norm and RoPE are a Metal kernel",
    "olmo": "its module ends the process without the package ai2-olmo, and fails with it: it adds "
    "a mask that is a word",
}

# What must be refused when it is loaded, by name and with a reason.
REFUSED = {"deepseek_v41", "phi3small", "plamo3"}
