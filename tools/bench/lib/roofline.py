"""The fewest bytes that a decode step moves."""

from vllm_metal_lite import backend
from vllm_metal_lite.model.loader import LoadedModel

# isort: split
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

mx = backend.mx


def weight_bytes(model: LoadedModel, batch: int) -> float:
    """Bytes of weights that a step reads; an embedding counts only if it is also the head.

    Of experts, those count that `batch` tokens use on average, if each takes random ones.
    """
    net = model.packed.model
    modules = dict(net.named_modules())
    has_head = any(path.endswith("lm_head") for path in modules)
    top_k = getattr(getattr(net, "args", None), "num_experts_per_tok", 1)
    total = 0.0
    for module in modules.values():
        if has_head and isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            continue
        nbytes = sum(a.nbytes for a in module.values() if isinstance(a, mx.array))
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            nbytes *= 1 - (1 - top_k / module.num_experts) ** batch  # the experts that are used
        total += nbytes
    return total


def step_bytes(model: LoadedModel, batch: int, context: float) -> float:
    """Bytes of weights and K/V, read once, and of recurrent states, read and written."""
    seen = sum(s.bytes_per_token * min(context, s.window or context) for s in model.kv_specs)
    return weight_bytes(model, batch) + batch * (seen + 2 * model.state_bytes)
