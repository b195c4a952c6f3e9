"""The peak memory of a full step: measured, or estimated for a model that is not loaded."""

import gc
import math

import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vllm_metal_lite.attention.sdpa.fused import unfused
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch, SegmentState
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel

# The peak memory of a call by products, as a multiple of its scores.  Measured: 1.4, and 3.4 with
# sinks.
_COPIES, _COPIES_WITH_SINKS = 1.5, 3.5
# The scores of earlier calls are still in memory while MLX prepares the next call: measured on a
# CPU, four calls without their copies.
_CALLS_AT_ONCE = 3


def step_peak_bytes(model: LoadedModel, config: EngineConfig, max_model_len: int) -> int:
    """Measure the bytes that a full step needs beyond weights, states and store.

    The step has one chunk with earlier context, and logits for as many rows as may be sampled.  One
    repeated block holds the whole context, so the store is tiny.
    """
    full, rows, context = _profiled_sizes(config, max_model_len)
    count = min(config.max_num_seqs, rows)
    inputs = InputBatch(count, context, config.block_size)
    lengths = np.ones(count, np.int64)
    lengths[-1] = rows - count + 1
    seats = np.array([inputs.add([0], 1) for _ in range(count)])
    # All segments share one slot: only the sizes matter.
    store = PagedStore(model.kv_specs, 1, config.block_size, states=model.packed.state_store(1))
    attention = ReferenceAttention(store)
    inputs.num_tokens[seats[-1]] = context
    batch = inputs.pack(
        seats,
        np.where(np.arange(count) == count - 1, context - lengths, 0),
        lengths,
        [SegmentState(0, 0)] * count,
    )
    gc.collect()  # memory that is freed later would hide a part of the peak
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    _run(model, attention, batch, min(config.max_logits_rows, rows))
    peak = mx.get_peak_memory() - before
    del store, attention
    mx.clear_cache()
    return int(peak * full / rows) + longer_context_bytes(model, full, context, max_model_len)


def _run(
    model: LoadedModel, attention: ReferenceAttention, batch: ForwardBatch, num_sampled: int
) -> None:
    step = attention.prepare(batch, batch.num_tokens)
    bound = attention.begin(step, attention.new_state())
    logits, _ = model.packed(bound, mx.arange(num_sampled))
    mx.eval(mx.softmax(logits.astype(mx.float32), axis=-1), attention.store.states.arrays)


def estimated_step_peak(model: LoadedModel, config: EngineConfig, max_model_len: int) -> int:
    """Estimate `step_peak_bytes` from the shapes of the model's weights; nothing runs.

    The estimate is the sum of three parts: the outputs of a layer's products, twice to cover the
    values between them; the K and V of one layer's context, and the scores of calls that keep them;
    the logits of all sampled rows, their float32 copy and its softmax.
    """
    full, rows, context = _profiled_sizes(config, max_model_len)
    sampled = min(config.max_logits_rows, rows)
    item, experts, width = model.dtype.size, model.usage.experts_per_token, 0
    for m in model.packed.model.modules():
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
    peak += _scores_bytes(model, full, context)
    return int(peak) + longer_context_bytes(model, full, context, max_model_len)


def _profiled_sizes(config: EngineConfig, max_model_len: int) -> tuple[int, int, int]:
    """Returns (rows of a full step, rows of the measured step, context of the measured step)."""
    device = profile()
    full = min(config.max_num_batched_tokens, max_model_len)
    rows = min(full, device.profile_rows)
    return full, rows, max(min(max_model_len, device.profile_context), rows)


def longer_context_bytes(model: LoadedModel, rows: int, context: int, max_model_len: int) -> int:
    """How many more bytes a step of `rows` needs at the longest context than at `context`.

    These bytes are copies of the keys and values of two layers, and scores up to their bound.
    """
    longer = max(min(max_model_len, profile().max_gathered_keys) - context, 0)
    copies = 2 * longer * max((spec.bytes_per_token for spec in model.kv_specs), default=0)
    scores = _scores_bytes(model, rows, max_model_len) - _scores_bytes(model, rows, context)
    return copies + max(scores, 0)


def _scores_bytes(model: LoadedModel, rows: int, context: int) -> int:
    """The most scores that calls keep in memory, with copies; 0 if MLX fuses all calls.

    rows: the rows of one request.
    """
    most = 0.0
    for shape in model.attention_shapes:
        if unfused(shape.num_heads, shape.k_head_dim, shape.softcap) is None:
            continue
        keys = context if shape.window is None else min(context, shape.window + rows)
        scores = min(shape.num_heads * rows * keys, _CALLS_AT_ONCE * profile().max_scores)
        copies = _COPIES_WITH_SINKS if shape.sinks else _COPIES
        most = max(most, copies * scores * shape.dtype.size)
    return int(most)
