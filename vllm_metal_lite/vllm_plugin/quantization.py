"""Lets vLLM accept weights quantised by MLX, which name no quantisation method."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


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
