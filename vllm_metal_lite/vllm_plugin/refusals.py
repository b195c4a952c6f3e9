"""Refuses unsupported vLLM options at start, with one line that names the option."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_metal_lite.config import BLOCK_SIZES
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.vllm_plugin import hosts
from vllm_metal_lite.vllm_plugin.compat import get

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _is_set(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return value > 1


def _not(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


# (path in VllmConfig, command-line name, test whether the value is unsupported)
_OPTIONS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("lora_config", "--enable-lora", _is_set),
    ("speculative_config", "--speculative-config", _is_set),
    ("kv_transfer_config", "--kv-transfer-config", _is_set),
    ("ec_transfer_config", "--ec-transfer-config", _is_set),
    ("watermark_config", "--watermark-config", _is_set),
    ("diffusion_config", "--diffusion-config", _is_set),
    ("weight_transfer_config", "--weight-transfer-config", _is_set),
    ("attention_config.backend", "--attention-backend", _is_set),
    ("parallel_config.data_parallel_external_lb", "--data-parallel-rank", _is_set),
    ("parallel_config.data_parallel_backend", "--data-parallel-backend", _not("mp")),
    ("parallel_config.prefill_context_parallel_size", "--prefill-context-parallel-size",
     _above_one),
    ("parallel_config.decode_context_parallel_size", "--decode-context-parallel-size",
     _above_one),
    ("parallel_config.enable_expert_parallel", "--enable-expert-parallel", _is_set),
    ("parallel_config.enable_eplb", "--enable-eplb", _is_set),
    ("parallel_config.enable_dbo", "--enable-dbo", _is_set),
    ("parallel_config.distributed_executor_backend", "--distributed-executor-backend",
     _not("uni", "mp", hosts.EXECUTOR)),
    ("cache_config.block_size", "--block-size", _not(*BLOCK_SIZES)),
    ("cache_config.cpu_offload_gb", "--cpu-offload-gb", _is_set),
    ("cache_config.kv_offloading_size", "--kv-offloading-size", _is_set),
    ("cache_config.kv_sharing_fast_prefill", "--kv-sharing-fast-prefill", _is_set),
    ("offload_config.uva.cpu_offload_gb", "--cpu-offload-gb", _is_set),
    ("model_config.quantization", "--quantization", _not("mlx")),
    ("model_config.revision", "--revision", _is_set),
    ("model_config.hf_overrides", "--hf-overrides", _is_set),
    ("model_config.model_impl", "--model-impl", _not("auto", "vllm")),
    ("model_config.convert", "--convert", _not("auto", "none")),
    ("model_config.logits_processors", "--logits-processors", _is_set),
    ("model_config.logprobs_mode", "--logprobs-mode", _not("raw_logprobs")),
    ("model_config.enable_prompt_embeds", "--enable-prompt-embeds", _is_set),
    ("model_config.enable_return_routed_experts", "--enable-return-routed-experts", _is_set),
    ("model_config.return_sampling_mask", "--return-sampling-mask", _is_set),
    ("model_config.enable_trace_replay", "--enable-trace-replay", _is_set),
    ("model_config.supports_multimodal_inputs", "multimodal input", _is_set),
    ("model_config.is_encoder_decoder", "an encoder-decoder model", _is_set),
    ("load_config.load_format", "--load-format", _not("auto", "safetensors", "hf")),
    ("profiler_config.profiler", "--profiler-config", _is_set),
)  # fmt: skip

_HINTS = {
    "--data-parallel-rank": "start a server for each rank, behind a balancer (docs/scale.md)",
    "--block-size": f"take one of {list(BLOCK_SIZES)}",
    "--attention-backend": "METAL_LITE_ATTENTION chooses between kernels and reference",
    "--quantization": "MLX's own checkpoints need no flag",
}


def refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError for the first unsupported option."""
    for path, option, is_too_much in _OPTIONS:
        value = get(vllm_config, path)
        if value is not None and is_too_much(value):
            _refuse(option, value)
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        for axis in ("tensor", "data"):
            if (size := getattr(parallel, f"{axis}_parallel_size")) > 1:
                hint = f"not with --{axis}-parallel-size {size}"
                _refuse("--pipeline-parallel-size", parallel.pipeline_parallel_size, hint)
    model = vllm_config.model_config
    if model is None:  # vLLM's own tools make configs without a model
        return
    if model.runner_type != "generate":
        given = model.runner != "auto"
        _refuse("--runner" if given else "a model for", model.runner_type)
    cache = vllm_config.cache_config
    if (size := cache.mamba_block_size) not in (None, cache.block_size, model.max_model_len):
        _refuse("--mamba-block-size", size, f"states have blocks of {cache.block_size} tokens")
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = str(cache.cache_dtype)
    if kv_dtype not in ("auto", dtype):
        _refuse(
            "--kv-cache-dtype", kv_dtype, f"K and V are kept in {dtype}, or in METAL_LITE_KV_BITS"
        )


def _refuse(option: str, value: Any, hint: str | None = None) -> None:
    text = option if value is True else f"{option} {_short(value)}"
    hint = hint or _HINTS.get(option)
    raise ConfigError(f"vllm-metal-lite does not support {text}" + (f": {hint}" if hint else ""))


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:60] + "..."
