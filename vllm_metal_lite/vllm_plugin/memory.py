"""How the memory is divided under vLLM: weights, recurrent states, a step, K and V."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.config import VllmConfig

from vllm_metal_lite import backend
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import OutOfMemoryError, size_text
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.step_peak import step_peak_bytes
from vllm_metal_lite.vllm_plugin.state_slot_manager import MOST_SLOTS

# The most of the memory beside weights and a step that state slots get.  A request needs about as
# much for its slots as for K and V of some thousand tokens.
_STATE_SHARE = 0.5


class MemorySizes(NamedTuple):
    """num_state_slots: slots of recurrent states; 0 for a model without any.  kv_bytes: bytes for K
    and V."""

    num_state_slots: int
    kv_bytes: int


def plan_memory(
    model: LoadedModel, specs: Sequence[LayerSpec], vllm_config: VllmConfig, caches_states: bool
) -> MemorySizes:
    """What vLLM's memory options leave for states and for K and V.

    specs: the layers whose K and V vLLM counts.  caches_states: vLLM gives state slots to requests,
    which wait while there are none; otherwise each seat needs a slot.
    Raises OutOfMemoryError, with the sum, if the device is too small.
    """
    cache, seats = vllm_config.cache_config, vllm_config.scheduler_config.max_num_seqs
    max_model_len = vllm_config.model_config.max_model_len
    config = EngineConfig(
        block_size=cache.block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        speculate="off",
    )
    limit, asked = backend.memory_limit(), cache.kv_cache_memory_bytes
    fraction = cache.gpu_memory_utilization
    if backend.is_cpu():  # other processes use this memory too
        fraction = min(fraction, profile().memory_fraction)
    if asked is None:
        usable, peak = int(limit * fraction), step_peak_bytes(model, config, max_model_len)
    else:
        usable, peak = limit - asked, 0
    left = usable - model.weight_bytes - peak
    num_state_slots = _num_state_slots(model, seats, left, caches_states)
    fixed = model.weight_bytes + num_state_slots * model.state_bytes
    left = usable - fixed - peak
    if asked is not None:
        if left < 0:
            raise OutOfMemoryError(
                f"--kv-cache-memory-bytes {asked} and {size_text(fixed)} of weights and states "
                f"are more than the {size_text(limit)} of this device"
            )
        return MemorySizes(num_state_slots, int(asked))
    block_bytes = config.block_size * sum(s.bytes_per_token for s in specs)
    if left < block_bytes:
        fewer = "--max-num-seqs or " if num_state_slots else ""
        raise OutOfMemoryError(
            f"{model.name} does not fit: {size_text(fixed)} of weights and states and "
            f"{size_text(peak)} of a step leave nothing for K and V of the {size_text(usable)} "
            f"that may be used (--gpu-memory-utilization {fraction:g} of {size_text(limit)}); "
            f"lower {fewer}--max-num-batched-tokens or raise --gpu-memory-utilization"
        )
    # No more can be owned: every seat at full length, and vLLM's null block.
    most = seats * -(-max_model_len // config.block_size) + 1
    return MemorySizes(num_state_slots, min(left, most * block_bytes))


def _num_state_slots(model: LoadedModel, seats: int, left: int, caches_states: bool) -> int:
    """left: bytes for states and for K and V."""
    if not model.state_bytes or not caches_states:
        return seats if model.state_bytes else 0
    fitting = int(left * _STATE_SHARE / model.state_bytes)
    # No more are of use: a slot that runs and a checkpoint for each seat.
    return max(min(fitting, 2 * seats + MOST_SLOTS), MOST_SLOTS)
