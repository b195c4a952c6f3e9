"""This engine for the serving benchmarks."""

from typing import Any

from tools.bench.lib.loads import WaveLoad
from vllm_metal_lite import EngineConfig, LLMEngine
from vllm_metal_lite.backend import mx
from vllm_metal_lite.benchmark import ThisEngine
from vllm_metal_lite.model.loader import LoadedModel


class FittedEngine(ThisEngine):
    """This engine, with a store that is large enough for the load and no larger.

    options: fields of EngineConfig.
    """

    def __init__(
        self,
        model: LoadedModel,
        load: WaveLoad,
        options: dict[str, Any] | None = None,
        name: str = "ours",
        params: dict[str, Any] | None = None,
    ) -> None:
        block_size = (options or {}).get("block_size", EngineConfig.block_size)
        sizes = load.sizes
        config = {
            "max_num_seqs": len(sizes),
            "speculate": "off",  # random weights repeat themselves
            "max_model_len": min(load.longest, model.max_position),
            "num_blocks": sum(-(-size // block_size) for size in sizes) + 1,
            **(options or {}),
        }
        before = mx.get_active_memory()
        super().__init__(LLMEngine(model, EngineConfig(**config)), name, params)
        self.resident_bytes = mx.get_active_memory() - before
