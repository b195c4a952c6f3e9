"""An engine in a few lines, for the user who has started it."""

from collections.abc import Iterator

from vllm_metal_lite import backend
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import size_text


def describe(engine: LLMEngine) -> Iterator[str]:
    """Lines about the model, the device, the store and the attention path."""
    model, config = engine.model, engine.config
    dtype = backend.dtype_name(model.dtype)
    first, size = engine.kv_groups[0], config.block_size
    arrays = engine.runner.attention.store
    store = size_text(arrays.nbytes)
    if config.kv_bits is not None:
        store += f", {config.kv_bits} bits a value"
    yield (
        f"Model:     {model.name}: {model.model_type}, {_count(model.num_parameters)} parameters, "
        f"{size_text(model.weight_bytes)}, computes in {dtype}"
    )
    yield f"Device:    {backend.describe()}"
    yield (
        f"Context:   {engine.max_model_len:,} tokens; the KV store holds "
        f"{first.num_blocks * size:,} ({first.num_blocks:,} blocks of {size}, {store})"
    )
    for group in engine.kv_groups:
        if group.window is not None:
            yield (
                f"Windows:   {len(group.layers)} layers see {group.window:,} tokens; "
                f"for them the store holds {group.num_blocks * size:,}"
            )
    if slots := arrays.states.num_slots:
        seats = config.max_num_seqs
        yield (
            f"States:    {size_text(slots * model.state_bytes)} of recurrent layers: "
            f"{seats} requests, {slots - seats} checkpoints"
        )
    if model.drafter is not None and config.speculate == "auto":
        yield f"Drafts:    at most {config.num_speculative_tokens} a step by {model.drafter.name}"
    if (kept := engine.prefix_disk.description) is not None:
        yield f"Prefixes:  {kept}"
    yield f"Attention: {engine.runner.attention.name} ({engine.runner.path.reason})"
    reason = engine.runner.compiled.reason
    yield "Decoding:  compiled" if reason is None else f"Decoding:  not compiled ({reason})"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 0.9995 * size:  # three digits round up to this unit
            return f"{number / size:.3g}{unit}"
    return str(number)
