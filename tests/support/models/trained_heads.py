"""Folders with a trained head beside the weights, and the head's own forward as an oracle."""

from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.packed import body_of

# The start of the head's names, the names of (norm of the embedding, norm of the hidden state, fc,
# last norm), and the start of the layer's; N is the number of the model's layers.
QWEN = ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.")
DEEPSEEK = ("model.layers.N.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "")
MIMO = (
    "model.mtp_layers.0.",
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "",
)
NAMES = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "mimo": MIMO,
}


class Head:
    """A head of random weights for a model of tests/support.  weights: by their published names."""

    def __init__(self, name: str, seed: int = 1) -> None:
        config = config_of(name)
        text = config.get("text_config", config)
        start, (e, h, fc, last), layer = NAMES[config["model_type"]]
        start = start.replace("N", str(text["num_hidden_layers"]))
        one = {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0}
        if "text_config" in config:
            config = {**config, "text_config": {**text, **one}}
        self.model = tiny.build({**config, **one}, seed)
        self.body: Any = body_of(self.model)
        size, rng = text["hidden_size"], np.random.default_rng(seed)
        self.norms = [mx.array(1 + 0.2 * rng.standard_normal(size), mx.float32) for _ in range(2)]
        self.fc = mx.array(rng.standard_normal((size, 2 * size)) / np.sqrt(size), mx.float32)
        self.hidden_first, self.eps = config["model_type"] == "mimo", text["rms_norm_eps"]
        named = {e: self.norms[0], h: self.norms[1], fc: self.fc, last: self.body.norm.weight}
        self.weights = {f"{start}{name}.weight": weight for name, weight in named.items()}
        for name, weight in tree_flatten(self.body.layers[0].parameters()):
            self.weights[f"{start}{layer}{name}"] = weight

    def drafts(self, target: nn.Module, tokens: list[int], count: int) -> list[int]:
        """The greedy drafts of the tokens after the known ones, computed from the start."""
        body: Any = body_of(target)
        embed = body.embed_tokens
        hidden = body(mx.array([tokens[:-1]]))
        drafts: list[int] = []
        for _ in range(count):
            e = embed(mx.array([[*tokens, *drafts][1:]]))
            parts = [mx.fast.rms_norm(e, self.norms[0], self.eps)]
            parts.append(mx.fast.rms_norm(hidden, self.norms[1], self.eps))
            x = mx.concatenate(parts[::-1] if self.hidden_first else parts, -1) @ self.fc.T
            y = self.body.layers[0](x, create_attention_mask(x, None, return_array=True), None)
            y = self.body.norm(y)
            drafts.append(int(mx.argmax(logits_of(target, y[:, -1]), -1).item()))
            hidden = mx.concatenate([hidden, y[:, -1:]], axis=1)
        return drafts


def logits_of(target: nn.Module, hidden: mx.array) -> mx.array:
    body: Any = body_of(target)
    above = next(m for m in target.modules() if any(c is body for c in m.children().values()))
    return above.lm_head(hidden) if "lm_head" in above else body.embed_tokens.as_linear(hidden)


def write_head(path: Path, head: Head, *, is_mlx: bool = True, minus_one: bool = False) -> Path:
    """Write a head's tensors to a folder, as an MLX conversion or as the model's makers do."""
    less = {n: w - 1 if w.ndim == 1 and "norm" in n else w for n, w in head.weights.items()}
    weights = less if minus_one else head.weights
    metadata = {"format": "mlx" if is_mlx else "pt"}
    mx.save_safetensors(str(path / "mtp.safetensors"), weights, metadata)
    return path
