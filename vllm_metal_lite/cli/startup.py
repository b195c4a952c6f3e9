"""Builds an engine from a model's name, and reports the start."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_metal_lite.cli import log
from vllm_metal_lite.config import EngineConfig

if TYPE_CHECKING:
    from vllm_metal_lite.engine.engine import LLMEngine
    from vllm_metal_lite.model.loader import LoadedModel

DEMO = (
    "demo is a tiny model (about 3 million parameters) that shows that everything works.  It "
    "recalls what you tell it, copies, sorts and does small sums; it knows nothing else.\n"
    "For a real one, give its folder or its name, such as mlx-community/Qwen3-0.6B-4bit."
)
Say = Callable[[str], None]  # gets the lines for the user


def load_model(name: str, config: EngineConfig, say: Say) -> "LoadedModel":
    say(f"Loading {name} ...")
    from vllm_metal_lite.model.loader import load

    return load(name, config.dtype, config.trust_remote_code)


def build_engine(model: "LoadedModel", config: EngineConfig, say: Say) -> "LLMEngine":
    from vllm_metal_lite.engine.describe import describe
    from vllm_metal_lite.engine.engine import LLMEngine

    engine = LLMEngine(model, config)
    log.clear()
    for line in describe(engine):
        say(line)
    if model.name == "demo":
        say(DEMO)
    return engine
