"""Lets vLLM use the text part of multimodal models, without their classes.

vLLM inspects a model's class first.  The classes of multimodal models import torchvision and more,
and accept images, which this engine cannot read.
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsPP


class TextModel(nn.Module, SupportsPP):
    """Only inspected: mlx-lm runs the model.  The signatures tell vLLM that it makes text."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        raise NotImplementedError

    def embed_input_ids(self, input_ids: Any) -> Any:
        raise NotImplementedError

    def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any = None) -> Any:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Any) -> Any:
        raise NotImplementedError


class HybridTextModel(TextModel, HasInnerState, IsHybrid):
    """Recurrent layers beside attention."""


def register_text_models() -> None:
    """Replace vLLM's multimodal classes; repeated calls change nothing.

    Text models in the same files (Qwen3.5) are replaced too, because they need the same imports.
    """
    from vllm.model_executor.models import registry

    models = registry.ModelRegistry.models
    found = {getattr(models[name], "module_name", "") for name in registry._MULTIMODAL_MODELS}
    modules = {m for m in found if m.startswith("vllm.")}  # models that users register stay
    for name, model in list(models.items()):
        if (module := getattr(model, "module_name", None)) in modules:
            kind = HybridTextModel if _names_hybrids(module) else TextModel
            registry.ModelRegistry.register_model(name, f"{__name__}:{kind.__name__}")


@cache
def _names_hybrids(module: str) -> bool:
    """Whether the source of a module of vLLM, which is not imported, has recurrent models."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    path = Path(spec.origin)
    files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    return any("IsHybrid" in file.read_text() for file in files)
