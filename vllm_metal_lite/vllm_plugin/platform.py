"""What vLLM asks of a platform.  Runs in the front-end process too, so MLX is never imported.

vLLM imports this before most of itself is ready, so its names are imported in the methods.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import Platform, PlatformEnum

from vllm_metal_lite import envs
from vllm_metal_lite.errors import MetalLiteError
from vllm_metal_lite.vllm_plugin.refusals import refuse_unsupported
from vllm_metal_lite.vllm_plugin.sampling import translate_params

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_WORKER = "vllm_metal_lite.vllm_plugin.worker.MetalLiteWorker"

# vLLM takes a device with 70 GiB or more for one of a data centre, and raises its default batch.
_MOST_MEMORY_TOLD = 64 << 30


class MetalLitePlatform(Platform):
    """MLX under vLLM; for torch, which only carries results to the front end, a CPU."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"
    device_control_env_var = "METAL_LITE_VISIBLE_DEVICES"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The first one is what "auto" becomes where the checkpoint's is not listed."""
        if envs.device() == "cpu":
            return [torch.float32]  # MLX's CPU backend is quick in nothing else
        return [torch.bfloat16, torch.float16, torch.float32]

    # Configuration

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        from vllm_metal_lite.vllm_plugin.quantization import register_mlx_quantization

        register_mlx_quantization()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Called in every process that makes a config: refuses what we cannot do, by name."""
        from vllm.config import CompilationMode

        refuse_unsupported(vllm_config)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = _WORKER
        vllm_config.parallel_config.disable_custom_all_reduce = True
        vllm_config.compilation_config.mode = CompilationMode.NONE  # there is no torch model
        vllm_config.compilation_config.cudagraph_capture_sizes = []

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: "VllmConfig") -> None:
        """Nothing to do: there is no attention backend of vLLM's, and its default suits us."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Yes; whether a model's layers form several groups is the worker's business."""
        return True

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse, as a bad request, what the sampler could not do (its errors end the engine)."""
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import SamplingParams

        if isinstance(params, SamplingParams):
            try:
                translate_params(params, vocab_size=None)
            except MetalLiteError as e:
                raise VLLMValidationError(str(e)) from e

    # The device

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(memory, _MOST_MEMORY_TOLD)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one device, and MLX has it."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Our sampler has no generator: noise follows from each request's seed."""

    @classmethod
    def empty_cache(cls) -> None:
        """torch holds nothing on a device."""

    @classmethod
    def import_kernels(cls) -> None:
        """None of vLLM's compiled kernels are used, and they need not be installed."""

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Every floating dtype of vLLM's is one of MLX's."""
