"""The language model inside of a model with a tower whose type mlx-lm does not know."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files.checkpoint import load_checkpoint

TOKENS = [5, 9, 11, 7, 30]
# How files nest the language model: for its body, and for its head.
NAMES = [
    ("model.text_model.", "lm_head."),  # SmolVLM
    ("model.language_model.", "lm_head."),  # InternVL, GLM-V
    ("language_model.model.", "language_model.lm_head."),  # as mlx-vlm writes them
    ("language_model.", "language_model.lm_head."),
]


def write(folder: Path, kind: str, text: str, body: str, head: str, **more: Any) -> Any:
    """Writes a folder of a type with a tower; returns mlx-lm's model for the language model."""
    config = config_of(text, **more)
    model = tiny.build(config)
    tensors = {"model.vision_tower.embed.weight": mx.zeros((2, 2)), "connector.a": mx.zeros(2)}
    for path, value in tree_flatten(model.parameters()):
        name = path.replace("lm_head.", head) if "lm_head." in path else path
        tensors[name.replace("model.", body, 1) if name == path else name] = value
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    whole = {"model_type": kind, "text_config": config, "vision_config": {}}
    whole |= {name: config[name] for name in ("quantization",) if name in config}
    (folder / "config.json").write_text(json.dumps(whole))
    return model


@pytest.mark.parametrize(("body", "head"), NAMES)
@pytest.mark.parametrize(
    ("kind", "text", "more"),
    [
        ("smolvlm", "llama", {}),
        ("idefics3", "llama/q4", {}),
        ("internvl", "qwen2", {"tie_word_embeddings": True}),
        ("lfm2_vl", "lfm2", {}),
        ("lfm2-vl", "lfm2", {}),
        ("a_type_of_next_year", "qwen3", {}),
    ],
)
def test_it_is_the_model_of_mlx_lm(
    kind: str, text: str, more: dict[str, Any], body: str, head: str, tmp_path: Path
) -> None:
    alone = write(tmp_path, kind, text, body, head, **more)
    model, _, has_head = load_checkpoint(tmp_path, trust_remote_code=False)
    assert has_head
    tokens = mx.array(TOKENS)[None]
    np.testing.assert_array_equal(np.array(model(tokens)), np.array(alone(tokens)))
    assert len(model.layers) == len(alone.layers)


def test_layers_beyond_those_of_the_configuration_are_left_out(tmp_path: Path) -> None:
    """Further layers, which are trained heads, are left out."""
    alone = write(tmp_path, "smolvlm", "llama", *NAMES[0])
    saved = mx.load(str(tmp_path / "model.safetensors"))
    more = f"model.text_model.layers.{len(alone.layers)}.input_layernorm.weight"
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {**saved, more: mx.zeros(2)})
    model, _, _ = load_checkpoint(tmp_path, trust_remote_code=False)
    assert len(model.layers) == len(alone.layers)


def test_a_language_model_that_mlx_lm_does_not_know_is_refused(tmp_path: Path) -> None:
    """The error is mlx-lm's own, about the type of the whole model."""
    write(tmp_path, "smolvlm", "llama", *NAMES[0])
    tiny.edit(tmp_path / "config.json", text_config={"model_type": "unheard_of"})
    with pytest.raises(ValueError, match="smolvlm not supported"):
        load_checkpoint(tmp_path, trust_remote_code=False)
