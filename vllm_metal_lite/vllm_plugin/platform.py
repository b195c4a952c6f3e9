"""The vLLM Platform class.  Also runs in the front-end process, so it never imports MLX.

vLLM imports this module during its own import, so the methods import vLLM's names.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import Platform, PlatformEnum

from vllm_metal_lite import __version__, envs
from vllm_metal_lite.config import MAX_CHUNK_TIMES_CONTEXT
from vllm_metal_lite.errors import MetalLiteError
from vllm_metal_lite.vllm_plugin.compat import guard_torch_accelerator
from vllm_metal_lite.vllm_plugin.hosts import EXECUTOR, use_address_towards_master
from vllm_metal_lite.vllm_plugin.refusals import note_what_vllm_sets, refuse_unsupported
from vllm_metal_lite.vllm_plugin.sampling import translate_params

if TYPE_CHECKING:
    from vllm.config import VllmConfig

guard_torch_accelerator()  # in each process of vLLM, also in one that only cleans up

_WORKER = "vllm_metal_lite.vllm_plugin.worker.MetalLiteWorker"
_RANK_WORKER = "vllm_metal_lite.vllm_plugin.rank_worker.RankWorker"


def too_long_steps(vllm_config: "VllmConfig") -> str | None:
    """A warning if macOS may kill a step: vLLM's scheduler does not shrink chunks for that."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if envs.device() in ("cpu", "cuda") or model is None:
        return None
    tokens, length = scheduler.max_num_batched_tokens, model.max_model_len
    most = max(MAX_CHUNK_TIMES_CONTEXT // length, scheduler.max_num_seqs)
    if tokens <= most:
        return None
    return (
        f"macOS may kill a step of {tokens:,} tokens in a context of {length:,} while a display "
        f"is on: lower --max-num-batched-tokens to {most}, or --max-model-len (docs/plugin.md)"
    )


class MetalLitePlatform(Platform):
    """MLX under vLLM.  torch sees a CPU, because torch only carries results to the front end.

    Reports no memory size: from 70 GiB up, vLLM would assume a data-centre GPU and raise its
    default batch sizes.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dist_backend = "gloo"
    simple_compile_backend = "eager"
    num_devices = 1  # of this host, as vLLM counts: each rank has one

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The first one replaces "auto" if the weights' dtype is not listed."""
        if envs.device() == "cpu":
            return [torch.float32]  # MLX's CPU backend is slow in other dtypes
        return super().supported_dtypes

    # Configuration

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        from vllm_metal_lite.vllm_plugin.quantization import register_mlx_quantization
        from vllm_metal_lite.vllm_plugin.text_models import register_text_models

        register_mlx_quantization()
        register_text_models()
        note_what_vllm_sets()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuse unsupported options by name.  Called in every process that makes a config."""
        from vllm.config import CompilationMode
        from vllm.logger import init_logger

        # vLLM reports the platform before it configures its loggers, so that line is lost.
        logger = init_logger("vllm.metal_lite")
        logger.info_once("vllm-metal-lite %s is active", __version__)
        refuse_unsupported(vllm_config)
        if warning := too_long_steps(vllm_config):
            logger.warning_once("%s", warning)
        parallel = vllm_config.parallel_config
        if parallel.nnodes > 1:
            use_address_towards_master(parallel)
            if parallel.node_rank == 0:
                parallel.distributed_executor_backend = EXECUTOR
        if parallel.worker_cls == "auto":
            parallel.worker_cls = _RANK_WORKER if parallel.world_size > 1 else _WORKER
        if parallel.pipeline_parallel_size > 1:
            # The scheduler then sends sampled tokens to the stages, which do not pass them on.
            vllm_config.scheduler_config.async_scheduling = False
        vllm_config.compilation_config.mode = CompilationMode.NONE  # there is no torch model

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """True; the worker decides whether the layers form several groups."""
        return True

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: "VllmConfig") -> None:
        """Called in the scheduler's process, by vLLM 0.30 and later."""
        from vllm_metal_lite.vllm_plugin import state_slot_manager

        if state_slot_manager.has_own_pool():
            state_slot_manager.register_state_slots()

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse, as a bad request, what the sampler cannot do: its error would end the engine."""
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import SamplingParams

        if isinstance(params, SamplingParams):
            try:
                translate_params(params, vocab_size=None)
            except MetalLiteError as e:
                raise VLLMValidationError(str(e)) from e

    # The device

    @classmethod
    def device_count(cls) -> int:
        return cls.num_devices

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def _nothing(cls, *_: Any) -> None:
        """Does nothing: MLX owns the only device, each request has its own seed, and vLLM's
        compiled kernels and attention backends are not used."""

    set_device = manual_seed_all = import_kernels = update_block_size_for_backend = _nothing
