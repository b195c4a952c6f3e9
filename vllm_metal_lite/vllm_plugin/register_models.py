"""Registers with vLLM what it must know about MLX's models.

Weights that MLX has quantised name no quantisation method, so "mlx" becomes one.  mlx-lm runs only
the text part of a multimodal model, so these get a class without images; vLLM's own class would
import torchvision and accept images.
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsPP


def register_mlx_quantization() -> None:
    """Register "mlx" as a vLLM quantisation method; repeated calls change nothing."""
    if "mlx" not in QUANTIZATION_METHODS:
        register_quantization_config("mlx")(MLXQuantization)


class MLXQuantization(QuantizationConfig):
    """Only a name: mlx-lm loads the weights, and vLLM creates no layers."""

    def get_name(self) -> str:
        return "mlx"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MLXQuantization":
        return cls()

    def get_quant_method(self, layer: Any, prefix: str) -> None:
        return None

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """MLX writes "group_size" and "bits" (and "mode"); others write "quant_method"."""
        method = hf_quant_cfg.get("quant_method")
        is_mlx = method in (None, "", "mlx") and {"group_size", "bits"} <= set(hf_quant_cfg)
        return "mlx" if is_mlx else None


class TextPart(nn.Module, SupportsPP):
    """Represents the text part of a multimodal model; vLLM only inspects the class.

    The signatures tell vLLM that the model generates text.  mlx-lm runs the model.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        raise NotImplementedError

    def embed_input_ids(self, input_ids: Any) -> Any:
        raise NotImplementedError

    def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any = None) -> Any:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Any) -> Any:
        raise NotImplementedError


class HybridTextPart(TextPart, HasInnerState, IsHybrid):
    """A text part with recurrent layers beside attention."""


def register_text_parts() -> None:
    """Replace vLLM's multimodal classes; repeated calls change nothing.

    Text models in the same files (Qwen3.5) are replaced too, because they need the same imports.
    """
    from vllm.model_executor.models import registry

    models = registry.ModelRegistry.models
    found = {getattr(models[name], "module_name", "") for name in registry._MULTIMODAL_MODELS}
    modules = {m for m in found if m.startswith("vllm.")}  # models that users register stay
    for name, model in list(models.items()):
        if (module := getattr(model, "module_name", None)) in modules:
            kind = HybridTextPart if _names_hybrids(module) else TextPart
            registry.ModelRegistry.register_model(name, f"{__name__}:{kind.__name__}")


@cache
def _names_hybrids(module: str) -> bool:
    """Whether the source of a vLLM module has recurrent models; the module is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    path = Path(spec.origin)
    files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    return any("IsHybrid" in file.read_text() for file in files)
