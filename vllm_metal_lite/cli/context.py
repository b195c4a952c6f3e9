"""The context of a model that fits into the memory of this machine."""

from collections.abc import Callable
from typing import Any

from vllm_metal_lite.cli.options import engine_flag
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import OutOfMemoryError
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.memory import size_store, store_bytes


def context_that_fits(
    model: LoadedModel, peak_of: Callable[[LoadedModel, EngineConfig, int], int]
) -> dict[str, Any]:
    """How much context an engine with default options has beside the weights.

    peak_of: the bytes of a full step, measured or estimated.
    max_model_len: the longest request here.  num_tokens, kv_store_bytes: of all requests together;
    num_tokens 0: the model does not fit, and memory_problem says why.
    """
    config = EngineConfig()
    try:
        groups, max_model_len, _ = size_store(model, config, peak_of)
    except OutOfMemoryError as e:
        problem = e.spelled(engine_flag).removeprefix(f"{model.name} does not fit: ")
        return {"max_model_len": 0, "num_tokens": 0, "memory_problem": problem}
    return {
        "max_model_len": max_model_len,
        "num_tokens": groups[0].num_blocks * config.block_size,
        "kv_store_bytes": store_bytes(model, groups, config.block_size),
    }
