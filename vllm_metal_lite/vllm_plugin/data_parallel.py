"""Data parallel: engines that each have a whole model, and share only their host.

vLLM starts the engines and balances requests between them.  Also imported by the front end, so this
file does not import MLX.
"""

from typing import TYPE_CHECKING

from vllm_metal_lite.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A key of `additional_config`, because each engine's own configuration counts only that engine.
_ENGINES = "metal_lite_engines_of_host"


def separate_engines(vllm_config: "VllmConfig") -> None:
    """Make each data-parallel rank an engine of its own.  Raises ConfigError for several hosts.

    For models with experts, vLLM runs the steps of all ranks together, because its ranks share the
    experts.  An idle rank would then wait for the others before it starts a request.  Our ranks
    share no experts.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.data_parallel_size == 1 or model is None:
        return
    size, local = parallel.data_parallel_size, parallel.data_parallel_size_local
    if parallel.data_parallel_rank_local is not None:
        raise ConfigError(
            "vllm-metal-lite does not support VLLM_DP_SIZE: start an LLM in each process without it"
        )
    if parallel.nnodes > 1:
        raise ConfigError(
            f"vllm-metal-lite does not support --data-parallel-size {size} with --nnodes "
            f"{parallel.nnodes}: start a server for each copy, behind a balancer (docs/scale.md)"
        )
    if local != size:  # if a host ends, vLLM's balancer still sends it requests
        raise ConfigError(
            f"vllm-metal-lite does not support {size} data-parallel ranks with {local} on this "
            "host: start a server on each host, behind a balancer (docs/scale.md)"
        )
    vllm_config.additional_config[_ENGINES] = size
    model.model_arch_config.num_experts = 0  # vLLM then treats the model as one without experts
    parallel.is_moe_model = False
    if parallel.world_size == 1:  # as without ranks: the model runs in the engine's process
        parallel.distributed_executor_backend = "uni"


def engines_of_host(vllm_config: "VllmConfig") -> int:
    """How many engines of this server there are, all of this host."""
    return vllm_config.additional_config.get(_ENGINES, 1)
