"""Estimates the memory of a step from shapes, for models that are not loaded and long contexts."""

import math

from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vllm_metal_lite.attention.sdpa.fused import unfused
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.model.loader import LoadedModel

# Peak of a call by products, in sizes of its scores: measured 1.4, and 3.4 with sinks.
_COPIES, _COPIES_WITH_SINKS = 1.5, 3.5

# The attributes of mlx-lm's modules that hold the number of experts per token.
_EXPERTS_PER_TOKEN = ("top_k", "num_experts_per_tok")


def estimated_step_peak(model: LoadedModel, config: EngineConfig, max_model_len: int) -> int:
    """As `memory.step_peak_bytes`, from the shapes of the model's weights; nothing runs.

    Counts the outputs of a layer's products, twice to cover the values between them; the K and V
    of one layer's context and the scores of a call that keeps them; the logits of all sampled rows,
    their float32 copy and its softmax.
    """
    device, modules = profile(), model.packed.model.modules()
    rows = min(config.max_num_batched_tokens, max_model_len)
    scale = rows / min(rows, device.profile_rows)
    sampled = min(config.max_sampled_rows, rows, device.profile_rows)
    context = max(min(max_model_len, device.profile_context), rows / scale)
    item = model.dtype.size
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
    peak = 2 * rows * item * layer
    peak += scale * (context * kept + sampled * model.vocab_size * copies)
    peak += _scores_bytes(model, rows, int(context))
    return int(peak) + longer_context_bytes(model, rows, int(context), max_model_len)


def longer_context_bytes(model: LoadedModel, rows: int, context: int, max_model_len: int) -> int:
    """What a step of `rows` needs at the longest context beyond a step at `context`.

    That is a copy of the keys and values of two layers, and scores up to their bound.
    """
    longer = max(min(max_model_len, profile().max_gathered_keys) - context, 0)
    copies = 2 * longer * max((spec.bytes_per_token for spec in model.kv_specs), default=0)
    scores = _scores_bytes(model, rows, max_model_len) - _scores_bytes(model, rows, context)
    return copies + max(scores, 0)


def _scores_bytes(model: LoadedModel, rows: int, context: int) -> int:
    """The most scores that one call keeps in memory, with copies; 0 if MLX fuses all calls.

    rows: those of one request.
    """
    most = 0.0
    for shape in model.attention_shapes:
        if unfused(shape.num_heads, shape.k_head_dim, shape.softcap) is None:
            continue
        keys = context if shape.window is None else min(context, shape.window + rows)
        scores = min(shape.num_heads * rows * keys, profile().max_scores)
        copies = _COPIES_WITH_SINKS if shape.sinks else _COPIES
        most = max(most, copies * scores * shape.dtype.size)
    return int(most)
