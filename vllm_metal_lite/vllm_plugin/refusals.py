"""Refuses unsupported vLLM options at start, with one line that names the option."""

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm_metal_lite import envs
from vllm_metal_lite.config import ATTENTION, BLOCK_SIZES, KV_BITS
from vllm_metal_lite.errors import ConfigError, shorten
from vllm_metal_lite.vllm_plugin import get

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's executor of the first host of several.
HOSTS_EXECUTOR = "vllm_metal_lite.vllm_plugin.executor.HostsExecutor"
_EXECUTORS = ("uni", "mp", HOSTS_EXECUTOR)

# (path in VllmConfig, command-line name, the values that are supported beside unset ones)
_OPTIONS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("lora_config", "--enable-lora", ()),
    ("speculative_config", "--speculative-config", ()),
    ("kv_transfer_config", "--kv-transfer-config", ()),
    ("ec_transfer_config", "--ec-transfer-config", ()),
    ("watermark_config", "--watermark-config", ()),
    ("diffusion_config", "--diffusion-config", ()),
    ("weight_transfer_config", "--weight-transfer-config", ()),
    ("attention_config.backend", "--attention-backend", ()),
    ("parallel_config.data_parallel_external_lb", "--data-parallel-rank", ()),
    ("parallel_config.data_parallel_size", "--data-parallel-size", (1,)),
    ("parallel_config.prefill_context_parallel_size", "--prefill-context-parallel-size", (1,)),
    ("parallel_config.decode_context_parallel_size", "--decode-context-parallel-size", (1,)),
    ("parallel_config.enable_expert_parallel", "--enable-expert-parallel", ()),
    ("parallel_config.enable_eplb", "--enable-eplb", ()),
    ("parallel_config.enable_dbo", "--enable-dbo", ()),
    ("parallel_config.distributed_executor_backend", "--distributed-executor-backend", _EXECUTORS),
    ("cache_config.block_size", "--block-size", BLOCK_SIZES),
    ("cache_config.prefix_match_unit", "--prefix-match-unit", ()),
    ("cache_config.kv_offloading_size", "--kv-offloading-size", ()),
    ("cache_config.kv_sharing_fast_prefill", "--kv-sharing-fast-prefill", ()),
    ("offload_config.uva.cpu_offload_gb", "--cpu-offload-gb", ()),
    ("offload_config.prefetch.offload_group_size", "--offload-group-size", ()),
    ("model_config.quantization", "weights quantised by", ("mlx",)),
    ("model_config.revision", "--revision", ("main",)),  # vLLM names the default, for hub models
    ("model_config.code_revision", "--code-revision", ()),
    ("model_config.hf_config_path", "--hf-config-path", ()),
    ("model_config.hf_overrides", "--hf-overrides", ()),
    ("model_config.model_impl", "--model-impl", ("auto", "vllm")),
    ("model_config.convert", "--convert", ("auto", "none", "embed")),
    ("model_config.logits_processors", "--logits-processors", ()),
    ("model_config.logprobs_mode", "--logprobs-mode", ("raw_logprobs",)),
    ("model_config.enable_prompt_embeds", "--enable-prompt-embeds", ()),
    ("aux_output_config.enable_return_routed_experts", "--enable-return-routed-experts", ()),
    ("model_config.enable_return_routed_experts", "--enable-return-routed-experts", ()),  # older
    ("model_config.return_sampling_mask", "--return-sampling-mask", ()),
    ("model_config.enable_trace_replay", "--enable-trace-replay", ()),
    ("model_config.supports_multimodal_inputs", "multimodal input", ()),
    ("model_config.is_encoder_decoder", "an encoder-decoder model", ()),
    ("load_config.load_format", "--load-format", ("auto", "safetensors", "hf")),
    ("load_config.download_dir", "--download-dir", ()),
    ("profiler_config.profiler", "--profiler-config", ()),
)

_BALANCER = "start a server for each rank, behind a balancer (docs/scale.md)"
_HINTS = {
    "--speculative-config": "only the server without vLLM speculates, by --speculate auto",
    "--data-parallel-rank": _BALANCER,
    "--data-parallel-size": _BALANCER,
    "--block-size": f"take one of {list(BLOCK_SIZES)}",
    "--attention-backend": "METAL_LITE_ATTENTION chooses between kernels and reference",
    "--prefix-match-unit": "a cached prefix ends with a block",
    "weights quantised by": "use those of mlx-community",
}


@cache
def note_what_vllm_sets() -> None:
    """Note, on each model's config, the options that vLLM's own code for this model sets, such as
    an attention backend for Gemma 4: no user gave them."""
    from vllm.config import VllmConfig

    update = VllmConfig.try_verify_and_update_config

    def noting(self: Any) -> None:
        before = {path: get(self, path) for path, *_ in _OPTIONS}
        update(self)
        if changed := [path for path, value in before.items() if get(self, path) != value]:
            self.model_config.set_by_vllm = changed

    VllmConfig.try_verify_and_update_config = noting


def refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError for the first unsupported option that a user gave."""
    not_given = get(vllm_config, "model_config.set_by_vllm") or ()
    for path, option, supported in _OPTIONS:
        value = get(vllm_config, path)
        if value and value not in supported and path not in not_given:
            _refuse(option, value)
    for name, given, allowed in (
        ("METAL_LITE_ATTENTION", envs.attention(), ATTENTION),
        ("METAL_LITE_KV_BITS", envs.kv_bits(), tuple(map(str, KV_BITS))),
    ):
        if given and given not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {given!r}")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 and (size := parallel.tensor_parallel_size) > 1:
        hint = f"not with --tensor-parallel-size {size}"
        _refuse("--pipeline-parallel-size", parallel.pipeline_parallel_size, hint)
    model = vllm_config.model_config
    if model is None:  # vLLM's own tools make configs without a model
        return
    if model.runner_type != "generate":
        _refuse_pooling(model, parallel)
    kv = vllm_config.cache_config
    if (size := kv.mamba_block_size) not in (None, kv.block_size, model.max_model_len):
        _refuse("--mamba-block-size", size, f"states have blocks of {kv.block_size} tokens")
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = str(kv.cache_dtype)
    if kv_dtype not in ("auto", dtype):
        _refuse("--kv-cache-dtype", kv_dtype, f"use {dtype}, or METAL_LITE_KV_BITS")


def _refuse_pooling(model: Any, parallel: Any) -> None:
    """Allow only embeddings by a decoder, of the last token or the mean, on one device."""
    option = "--runner" if model.runner != "auto" else "a model for"
    if model.convert_type != "embed" or model.attn_type == "encoder_only":
        _refuse(option, model.runner_type, "only embeddings by a decoder are supported")
    if (kind := model.pooler_config.seq_pooling_type) not in ("LAST", "MEAN"):
        _refuse(option, model.runner_type, f"its pooling type is {kind}; use LAST or MEAN")
    if parallel.world_size > 1:
        _refuse(option, model.runner_type, "pooling runs on one device")


def _refuse(option: str, value: Any, hint: str | None = None) -> None:
    shown = isinstance(value, str | int | float) and value is not True
    text = f"{option} {shorten(str(value))}" if shown else option
    hint = hint or _HINTS.get(option)
    raise ConfigError(f"vllm-metal-lite does not support {text}" + (f": {hint}" if hint else ""))
