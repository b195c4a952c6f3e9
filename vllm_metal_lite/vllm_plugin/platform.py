"""The vLLM Platform class.  Also runs in the front-end process, so it never imports MLX.

vLLM imports this module during its own import, so the methods import vLLM's names.
"""

import os
import socket
from typing import TYPE_CHECKING, Any

import psutil
import torch
from vllm.platforms import Platform, PlatformEnum

from vllm_metal_lite import __version__, envs
from vllm_metal_lite.config import MAX_CHUNK_TIMES_CONTEXT
from vllm_metal_lite.errors import ConfigError, MetalLiteError, one_line
from vllm_metal_lite.vllm_plugin.refusals import (
    HOSTS_EXECUTOR,
    note_what_vllm_sets,
    refuse_unsupported,
)
from vllm_metal_lite.vllm_plugin.sampling import translate_params

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

# At its end each process of vLLM empties torch's caches, which raises without an accelerator.
if not torch.accelerator.is_available():
    for _name in ("empty_cache", "empty_host_cache"):
        setattr(torch.accelerator, _name, lambda: None)

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


def use_address_towards_master(parallel: "ParallelConfig") -> None:
    """With several hosts, let vLLM, gloo and NCCL use this host's address towards the others.

    vLLM would take the address that leads to the internet.  The user's own settings have priority.
    Raises ConfigError if --master-addr cannot be right.
    """
    own = _own_address(parallel)
    address = os.environ["VLLM_HOST_IP"] = os.environ.get("VLLM_HOST_IP") or own
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
    raise ConfigError(
        f"VLLM_HOST_IP {address} is not an IPv4 address of this host; {own} reaches --master-addr"
    )


def _own_address(parallel: "ParallelConfig") -> str:
    master = parallel.master_addr
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            if parallel.node_rank == 0:
                s.bind((master, 0))
            else:  # sends nothing
                s.connect((master, parallel.master_port))
        except OSError as e:
            wrong = "this host, of --node-rank 0, has no such address"
            if parallel.node_rank:
                wrong = "this host has no route to it"
            raise ConfigError(f"--master-addr {master}: {wrong} (IPv4): {one_line(e)}") from e
        return str(s.getsockname()[0])


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
        from vllm_metal_lite.vllm_plugin import register_models

        register_models.register_mlx_quantization()
        register_models.register_text_parts()
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
                parallel.distributed_executor_backend = HOSTS_EXECUTOR
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
