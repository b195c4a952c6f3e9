"""A light LLM engine for Macs with Apple silicon, on MLX: many requests at once over a paged K/V
store, from Python, over HTTP, or below vLLM.

Importing this package imports neither MLX, torch nor vLLM; what is named below is loaded when it
is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_metal_lite.config import EngineConfig as EngineConfig
    from vllm_metal_lite.engine.async_engine import AsyncEngine as AsyncEngine
    from vllm_metal_lite.engine.engine import LLMEngine as LLMEngine
    from vllm_metal_lite.engine.llm import LLM as LLM
    from vllm_metal_lite.errors import MetalLiteError as MetalLiteError
    from vllm_metal_lite.outputs import RequestOutput as RequestOutput
    from vllm_metal_lite.pooling_params import PoolingParams as PoolingParams
    from vllm_metal_lite.sampling_params import SamplingParams as SamplingParams
    from vllm_metal_lite.structured_params import (
        StructuredOutputsParams as StructuredOutputsParams,
    )
    from vllm_metal_lite.structured_params import ThinkingParams as ThinkingParams

__version__ = "0.1.0"

_HOME = {
    "AsyncEngine": "engine.async_engine",
    "EngineConfig": "config",
    "LLM": "engine.llm",
    "LLMEngine": "engine.engine",
    "MetalLiteError": "errors",
    "PoolingParams": "pooling_params",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_params",
    "ThinkingParams": "structured_params",
}
__all__ = [*_HOME, "__version__"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
