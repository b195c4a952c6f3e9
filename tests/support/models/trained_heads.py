"""Folders with a trained head beside the weights, and the head's own forward as an oracle."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.packed import body_of


class Names(NamedTuple):
    """A family's names in its files, and what else is special in it.

    start: of all names; N is the number of the model's layers.
    joined: the norm of the embedding, the norm of the hidden state, fc.
    last: the last norm; "" if it is the model's, and the hidden states are those before it.
    changes: of the configuration, for the head's layers.  layers: the starts of their names.
    embedding: its name in mlx-lm.  norm: that of the last norm.  others: names in mlx-lm that
    differ from those in files.
    """

    start: str
    joined: tuple[str, str, str]
    last: str
    changes: dict[str, Any]
    layers: tuple[str, ...] = ("",)
    embedding: str = "embed_tokens"
    norm: str = "norm"
    hidden_first: bool = False
    others: tuple[tuple[str, str], ...] = ()


QWEN = Names(
    "mtp.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"),
    "norm",
    {"full_attention_interval": 1},
    ("layers.0.",),
)
DEEPSEEK = Names(
    "model.layers.N.",
    ("enorm", "hnorm", "eh_proj"),
    "shared_head.norm",
    {"first_k_dense_replace": 0},
)
BAILING = DEEPSEEK._replace(
    last="final_layernorm",
    changes={"first_k_dense_replace": 0, "layer_group_size": 1},
    embedding="word_embeddings",
)
# As in vLLM's mimo_mtp.py, mimo_v2_mtp.py, exaone_moe_mtp.py and nemotron_h_mtp.py.
MIMO = Names(
    "model.mtp_layers.0.",
    ("token_layernorm", "hidden_layernorm", "input_proj"),
    "final_layernorm",
    {},
    hidden_first=True,
)
MIMO_V2 = Names(
    "model.mtp.layers.0.",
    ("enorm", "hnorm", "eh_proj"),
    "final_layernorm",
    {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0]},
    others=(("post_attention_layernorm", "pre_mlp_layernorm"),),
)
EXAONE = QWEN._replace(changes={"is_moe_layer": [False], "layer_types": ["sliding_attention"]})
NEMOTRON = Names(
    "mtp.",
    ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj"),
    "layers.1.final_layernorm",
    {"hybrid_override_pattern": ["*", "E"]},
    ("layers.0.", "layers.1."),
    embedding="embeddings",
    norm="norm_f",
)
# Names as in vLLM's ernie_mtp.py, the forward as in PaddleFormers, ernie4_5_moe/modeling.py.
ERNIE = Names(
    "model.mtp_",
    ("emb_norm.0", "hidden_norm.0", "linear_proj.0"),
    "",
    {"moe_layer_start_index": 1},
    ("block.0.",),
)
NAMES = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32/top8": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK,
    "bailing_hybrid": BAILING,
    "bailing_moe_v3": BAILING,
    "mimo": MIMO,
    "mimo_v2_flash": MIMO_V2,
    "exaone_moe": EXAONE,
    "nemotron_h": NEMOTRON,
    "ernie4_5_moe": ERNIE,
}


class Head:
    """A head of random weights for a model of tests/support.  weights: by their published names."""

    def __init__(self, name: str, seed: int = 1) -> None:
        config = config_of(name)
        text = config.get("text_config", config)
        self.names = names = NAMES[name]
        one = {"num_hidden_layers": 1, **names.changes}
        changed = {**config, **one}
        if "text_config" in config:
            changed["text_config"] = {**text, **one}
        self.model = tiny.build(changed, seed)
        self.body: Any = body_of(self.model)
        size, rng = text["hidden_size"], np.random.default_rng(seed)
        self.norms = [mx.array(1 + 0.2 * rng.standard_normal(size), mx.float32) for _ in range(2)]
        self.fc = mx.array(rng.standard_normal((size, 2 * size)) / np.sqrt(size), mx.float32)
        self.eps = text["rms_norm_eps"]
        self.window = text.get("sliding_window", text.get("sliding_window_size"))
        named = dict(zip(names.joined, (*self.norms, self.fc), strict=True))
        if names.last:
            named[names.last] = self.body[names.norm].weight
        start = names.start.replace("N", str(text["num_hidden_layers"]))
        self.weights = {f"{start}{name}.weight": weight for name, weight in named.items()}
        for place, layer in zip(names.layers, self.body.layers, strict=True):
            for name, weight in tree_flatten(layer.parameters()):
                for mine, published in names.others:
                    name = name.replace(mine, published)
                self.weights[f"{start}{place}{name}"] = weight

    def drafts(self, target: nn.Module, tokens: list[int], count: int) -> list[int]:
        """The greedy drafts of the tokens after the known ones, computed from the start."""
        body: Any = body_of(target)
        norm, embed = body[self.names.norm], body[self.names.embedding]
        last = self.body[self.names.norm] if self.names.last else nn.Identity()
        body[self.names.norm] = norm if self.names.last else nn.Identity()
        hidden = body(mx.array([tokens[:-1]]))
        body[self.names.norm] = norm
        drafts: list[int] = []
        for _ in range(count):
            e = embed(mx.array([[*tokens, *drafts][1:]]))
            parts = [mx.fast.rms_norm(e, self.norms[0], self.eps)]
            parts.append(mx.fast.rms_norm(hidden, self.norms[1], self.eps))
            y = mx.concatenate(parts[::-1] if self.names.hidden_first else parts, -1) @ self.fc.T
            for layer in self.body.layers:
                window = self.window if getattr(layer, "is_sliding_window", False) else None
                y = layer(y, create_attention_mask(y, None, window, return_array=True), None)
            y = last(y)
            last_row = y[:, -1] if self.names.last else norm(y[:, -1])
            drafts.append(int(mx.argmax(logits_of(target, last_row), -1).item()))
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
