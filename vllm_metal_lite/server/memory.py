"""How much memory the models of a server may use: all together, and each of them."""

from vllm_metal_lite import backend
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import ConfigError, Option, size_text

_GIB = 2**30
# A model needs more than its weights: K and V, states, and what a step computes.
_WEIGHTS_TIMES, _BESIDE_WEIGHTS = 1.25, _GIB


def memory_budget(config: EngineConfig, gib: float | None) -> int:
    """Bytes for all models together.  gib: the user's choice; None: a safe share of the device.

    Raises ConfigError if the choice exceeds the device's memory.
    """
    limit = backend.memory_limit()
    if gib is None:
        return int(limit * (config.memory_fraction or profile().memory_fraction))
    if (budget := int(gib * _GIB)) > limit:
        why = f" is {size_text(budget)}; this device has {size_text(limit)}"
        raise ConfigError(Option("memory_budget_gib"), why)
    return budget


def share(budget: int, num_models: int, weight_bytes: int) -> int:
    """Bytes that one model gets: all of the budget if it is alone."""
    least = int(_WEIGHTS_TIMES * weight_bytes + _BESIDE_WEIGHTS)
    return min(max(budget // num_models, least), budget)
