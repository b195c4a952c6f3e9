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
    from vllm_metal_lite.engine.describe import describe
    from vllm_metal_lite.engine.engine import LLMEngine
    from vllm_metal_lite.model.loader import load

    with log.progress():
        model = load(name, config.dtype, config.trust_remote_code)
        if configure is not None:
            config = configure(model, config)
        engine = LLMEngine(model, config)
    for line in describe(engine):
        say(line)
    if name == "demo":
        say(_DEMO.format(name_after))
    return engine
