"""Runs the language model inside of a model with a vision tower whose type mlx-lm does not know.

mlx-lm knows the type of the language model, `text_config.model_type`.  Its weights get the names
that they have in mlx-lm's own models with towers, and the weights of the tower are left out.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes
from transformers import AutoConfig

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files.folder import Weights, weights

# model_type of the whole model -> its name in transformers, if it differs.
_WHOLE = {"pixtral": "llava", "lfm2-vl": "lfm2_vl"}
# model_type of the language model -> (its name in mlx-lm, fields that transformers does not write).
_INNER: dict[str, tuple[str, dict[str, Any]]] = {
    "glm_ocr_text": ("glm4", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    "glm4v_text": ("glm4", {"attention_bias": True, "partial_rotary_factor": 1.0}),
    "glm4v_moe_text": ("glm4_moe", {"use_qk_norm": False}),
}
# How files nest the language model.
_INSIDE = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEAD = "lm_head.weight"


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the defaults of transformers, which files may leave out."""
    own = {name: value for name, value in config.items() if name != "model_type"}
    kind = str(config.get("model_type"))
    try:
        full = AutoConfig.for_model(
            _WHOLE.get(kind, kind), **deepcopy(own)
        ).to_dict()  # for_model changes its arguments
    except Exception:  # an unknown model, or a field that this version refuses
        return dict(config)
    parts = {
        name: (full.get(name) or {}) | config.get(name, {})
        for name in ("text_config", "vision_config")
    }
    return full | dict(config) | parts


class Model(nn.Module):
    """Like mlx-lm's models with towers, it holds the language model as `language_model`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.language_model = inner
        for name in ("make_cache", "cast_predicate"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
        return self.language_model(inputs, cache=cache)

    @property
    def layers(self) -> Any:
        return self.language_model.layers

    def sanitize(self, weights: Weights) -> Weights:
        inner = {
            _INSIDE.sub("model.", name).replace("model.lm_head.", "lm_head."): weight
            for name, weight in weights.items()
            if _INSIDE.match(name) or name.startswith("lm_head.")
        }
        # Files may have further layers, which are trained heads (GLM-OCR).
        count = len(self.layers)
        inner = {n: w for n, w in inner.items() if not (m := _LAYER.match(n)) or int(m[1]) < count}
        inner = getattr(self.language_model, "sanitize", dict)(inner)
        return {f"language_model.{name}": weight for name, weight in inner.items()}


def inner_classes(folder: Path) -> Callable[..., Any]:
    """`get_model_classes` of mlx-lm's `load_model`, for a folder with a tower."""
    args = SimpleNamespace(from_dict=lambda config: inner_model(config, folder))
    return lambda config: (Model, args)


def inner_model(config: Mapping[str, Any], folder: Path) -> Any:
    """The language model, without its weights.  Raises for one that mlx-lm does not know."""
    text = completed(config)["text_config"]
    rope = text.get("rope_parameters") or {}
    kind = text["model_type"]
    inner, more = _INNER.get(kind, (kind, {}))
    model_class, args_class = _get_classes({"model_type": inner})
    args = {
        "head_dim": text["hidden_size"] // text["num_attention_heads"],
        "block_dim": text["hidden_size"],  # LFM2
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        **more,
        **rope,
        **text,
        "model_type": inner,
        "tie_word_embeddings": not any(name.endswith(_HEAD) for name, _ in weights(folder)),
    }
    return model_class(args_class.from_dict(args))
