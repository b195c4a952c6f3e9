"""Builds an engine from a model's name, and reports the start."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_metal_lite.cli import log
from vllm_metal_lite.config import EngineConfig

if TYPE_CHECKING:
    from vllm_metal_lite.engine.engine import LLMEngine
    from vllm_metal_lite.model.loader import LoadedModel

_DEMO = (
    "demo is a tiny model (about 3 million parameters) that is shipped to show that everything "
    "works: it recalls what you tell it, copies, sorts, and does small sums, and knows nothing "
    "else.\nFor a real one, give its name or its folder: {} mlx-community/Qwen3-0.6B-4bit"
)


def start_engine(
    name: str,
    config: EngineConfig,
    say: Callable[[str], None],
    name_after: str,
    configure: "Callable[[LoadedModel, EngineConfig], EngineConfig] | None" = None,
) -> "LLMEngine":
    """Load a model and build its engine; `say` gets the lines for the user.

    name_after: the words before a model's name on the command line, for a usage hint.
    configure: gives the options that suit the loaded model.
    """
    say(f"Loading {name} ...")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from vllm_metal_lite import backend
    from vllm_metal_lite.devices import profile
    from vllm_metal_lite.engine.engine import LLMEngine
    from vllm_metal_lite.model.loader import load

    with log.progress():
        model = load(name, config.dtype, config.trust_remote_code)
        if configure is not None:
            config = configure(model, config)
        engine = LLMEngine(model, config)
    model = engine.model
    dtype = str(model.dtype).removeprefix("mlx.core.")
    first, size = engine.kv_groups[0], config.block_size
    store = _size(engine.runner.attention.store.nbytes)
    if config.kv_bits is not None:
        store += f", {config.kv_bits} bits a value"
    say(
        f"Model:     {name}: {model.model_type}, {_count(model.num_parameters)} parameters, "
        f"{_size(model.weight_bytes)}, computes in {dtype}"
    )
    day = profile().tuned
    say(f"Device:    {backend.describe()}{f', tuned on {day}' if day else ''}")
    say(
        f"Context:   {engine.max_model_len:,} tokens; the KV store holds "
        f"{first.num_blocks * size:,} ({first.num_blocks:,} blocks of {size}, {store})"
    )
    for group in engine.kv_groups:
        if group.window is not None:
            say(
                f"Windows:   {len(group.layers)} layers see {group.window:,} tokens; "
                f"for them the store holds {group.num_blocks * size:,}"
            )
    if slots := engine.num_state_slots:
        seats = config.max_num_seqs
        say(
            f"States:    {_size(slots * model.state_bytes)} of recurrent layers: {seats} requests, "
            f"{slots - seats} checkpoints"
        )
    if config.enable_prefix_caching and model.packed.no_prefix_cache:
        say(f"Prefixes:  not cached for this model: {model.packed.no_prefix_cache}")
    say(f"Attention: {engine.runner.attention.name} ({engine.attention_reason})")
    reason = engine.runner.compiled.reason
    say("Decoding:  compiled" if reason is None else f"Decoding:  not compiled ({reason})")
    if name == "demo":
        say(_DEMO.format(name_after))
    return engine


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
