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
from vllm_metal_lite.runner.memory import store_bytes
from vllm_metal_lite.runner.step_peak import step_peak_bytes
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.vllm_plugin.state_slot_manager import MAX_SLOTS_PER_REQUEST

# State slots take at most this share of the memory that weights and a step leave.
_STATE_SHARE = 0.5
# On a CPU, K and V are sized for at most this many seats: with vLLM's default of 256, a tiny model
# took 8 GB.
_CPU_SEATS = 32


class MemorySizes(NamedTuple):
    """num_state_slots: slots for recurrent states, 0 if the model has none.  kv_bytes: bytes for K
    and V."""

    num_state_slots: int
    kv_bytes: int


def plan_memory(
    model: LoadedModel, specs: Sequence[LayerSpec], vllm_config: VllmConfig, caches_states: bool
) -> MemorySizes:
    """The memory that vLLM's options leave for states and for K and V.

    specs: the layers whose K and V vLLM counts.  caches_states: vLLM gives state slots to requests,
    which wait while there are none; otherwise each seat needs a slot.
    Raises OutOfMemoryError, with the sum, if the device is too small.
    """
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    limit, seats = backend.memory_limit(), scheduler.max_num_seqs
    asked = cache.kv_cache_memory_bytes
    if asked is not None:
        num_state_slots, _ = _slots(model, limit - asked, seats, caches_states)
        return MemorySizes(num_state_slots, int(asked))
    config = EngineConfig(
        block_size=cache.block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        speculate="off",
    )
    max_model_len = vllm_config.model_config.max_model_len
    fraction = cache.gpu_memory_utilization
    if backend.is_cpu():  # other processes use this memory too
        fraction = min(fraction, profile().memory_fraction)
    usable, peak = int(limit * fraction), step_peak_bytes(model, config, max_model_len)
    num_state_slots, left = _slots(model, usable - peak, seats, caches_states)
    block_bytes = config.block_size * sum(s.bytes_per_token for s in specs)
    if left < block_bytes:
        fixed = size_text(usable - peak - left)
        fewer = "--max-num-seqs or " if num_state_slots else ""
        raise OutOfMemoryError(
            f"{model.name} does not fit: {fixed} of weights and states and {size_text(peak)} of a "
            f"step leave nothing for K and V of the {size_text(usable)} that may be used "
            f"(--gpu-memory-utilization {fraction:g} of {size_text(limit)}); "
            f"lower {fewer}--max-num-batched-tokens or raise --gpu-memory-utilization"
        )
    # Room for each seat at full length, the cached prefixes of two idle requests a seat, and
    # vLLM's null block.
    requests = min(seats, _CPU_SEATS) if backend.is_cpu() else seats
    requests *= 3 if cache.enable_prefix_caching else 1
    most = requests * -(-max_model_len // config.block_size) + 1
    return MemorySizes(num_state_slots, min(left, most * block_bytes))


def check_fits(
    model: LoadedModel, groups: Sequence[KVGroup], block_size: int, num_state_slots: int
) -> None:
    """Raise OutOfMemoryError if vLLM's blocks exceed the device, because a user asks for more than
    `plan_memory` gives.  Layers of several groups share the arrays of the largest group."""
    largest = max(groups, key=lambda group: len(group.layers))
    needed, limit = store_bytes(model, [largest], block_size), backend.memory_limit()
    needed += model.weight_bytes + num_state_slots * model.state_bytes
    if needed > limit:
        raise OutOfMemoryError(
            f"weights, states and {largest.num_blocks} blocks need {size_text(needed)}, the device "
            f"has {size_text(limit)}: lower --num-gpu-blocks-override or --kv-cache-memory-bytes"
        )


def _slots(model: LoadedModel, num_bytes: int, seats: int, caches_states: bool) -> tuple[int, int]:
    """The number of state slots, and the bytes that these and the weights leave of num_bytes."""
    left, num_slots = num_bytes - model.weight_bytes, seats
    if not model.state_bytes:
        return 0, left
    if caches_states:
        fitting = int(left * _STATE_SHARE / model.state_bytes)
        # Each seat needs its running state and one checkpoint; more would stay unused.
        num_slots = max(min(fitting, 2 * seats + MAX_SLOTS_PER_REQUEST), MAX_SLOTS_PER_REQUEST)
    return num_slots, left - num_slots * model.state_bytes
