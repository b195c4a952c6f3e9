"""The peak memory of a full step of a model that is not loaded, estimated."""

import math

from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.step_peak import longer_context_bytes, profiled_sizes, scores_bytes

# The attributes of mlx-lm's modules that hold the number of experts per token.
_EXPERTS_PER_TOKEN = ("top_k", "num_experts_per_tok")


def estimated_step_peak(model: LoadedModel, config: EngineConfig, max_model_len: int) -> int:
    """As `step_peak_bytes`, from the shapes of the model's weights; nothing runs.

    Counts the outputs of a layer's products, twice to cover the values between them; the K and V
    of one layer's context and the scores of a call that keeps them; the logits of all sampled rows,
    their float32 copy and its softmax.
    """
    full, rows, context = profiled_sizes(config, max_model_len)
    sampled = min(config.max_sampled_rows, rows)
    modules, item = model.packed.model.modules(), model.dtype.size
    experts = max((getattr(m, name, 0) for m in modules for name in _EXPERTS_PER_TOKEN), default=0)
    width = 0
    for m in modules:
        weight = m.get("weight")
        if weight is None or weight.ndim < 2 or weight.shape[-2] == model.vocab_size:
            continue
        is_expert = isinstance(m, (SwitchLinear, QuantizedSwitchLinear))
        width += weight.shape[-2] * (experts if is_expert else math.prod(weight.shape[:-2]))
    layer = width / max(len(model.packed.layout.nodes), 1)
    copies = item + 8 if item < 4 else 8
    kept = max((s.bytes_per_token for s in model.kv_specs), default=0)
    peak = 2 * full * item * layer
    peak += full / rows * (context * kept + sampled * model.vocab_size * copies)
    peak += scores_bytes(model, full, context)
    return int(peak) + longer_context_bytes(model, full, context, max_model_len)
