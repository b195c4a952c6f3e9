"""The random models of the serving benchmarks as folders, for servers that load by name."""

import json
from pathlib import Path
from typing import Any

from tools.bench.lib.models import random_weights
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files import DEMO_PATH

# isort: split
from mlx.utils import tree_flatten


def write_model(shape: str, path: Path, dtype: str = "float32", bits: str | None = None) -> Path:
    """A key of SHAPES or HIDDENxLAYERS, with a tokenizer that has text for every token id."""
    model, config = random_weights(shape, getattr(mx, dtype), bits)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((DEMO_PATH / "tokenizer.json").read_text())
    vocabulary: dict[str, Any] = tokenizer["model"]["vocab"]
    demo = list(vocabulary)
    for i in range(len(vocabulary), config["vocab_size"]):
        vocabulary[f"{demo[i % len(demo)]}{i}"] = i  # made by no merge, so no prompt holds it
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text((DEMO_PATH / "tokenizer_config.json").read_text())
    return path
