"""Heads that were trained with a model to draft its tokens (multi-token prediction).

mlx-lm leaves their weights out.  They are in the model's folder, or in a folder of their own.  The
tensors decide, because config.json often names a head that a conversion has dropped.

A head is read as a model of one layer, of the model's own class.  Its embedding is a
`HeadEmbedding`, and the model's LM head makes its logits.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.nn as nn
from mlx_lm.utils import _get_classes, infer_quant_config

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files.folder import Weights
from vllm_metal_lite.model.packed import body_of
from vllm_metal_lite.model.seam.head_embedding import HeadEmbedding, ModelsHead


class _Family(NamedTuple):
    """How models name the tensors of their heads.

    start: a regular expression for the start of a name; {n} is the number of layers.
    names: pairs (regular expression for the rest, its name in the body of the model of one layer);
    the first match counts.  An empty name leaves the tensor out.
    changes: the fields of config.json that make the model of one layer.
    hidden_first: see HeadEmbedding.  minus_one: files store the weights of norms minus one, unless
    an MLX conversion has added the one.
    """

    start: str
    names: tuple[tuple[str, str], ...]
    changes: dict[str, Any]
    hidden_first: bool = False
    minus_one: bool = False


def _names(embedding: str, hidden: str, fc: str, *others: tuple[str, str]) -> tuple:
    joined = {embedding: "norm_embedding", hidden: "norm_hidden", fc: "fc"}
    return (*((rf"{old}\.", f"embed_tokens.{new}.") for old, new in joined.items()), *others)


_LAYER = ("", "layers.0.")
_QWEN = _Family(
    r"(language_model\.|model\.)*mtp\.",
    _names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"),
    {"full_attention_interval": 1, "mlp_only_layers": []},
    minus_one=True,
)
_DEEPSEEK = _Family(
    r"(language_model\.)?model\.layers\.{n}\.",
    _names(
        "enorm",
        "hnorm",
        "eh_proj",
        (r"shared_head\.norm\.", "norm."),
        (r"shared_head\.head\.|embed_tokens\.|.*rotary_emb\.", ""),
        _LAYER,
    ),
    {"first_k_dense_replace": 0},
)
_MIMO = _Family(
    r"model\.mtp_layers\.0\.",
    _names(
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        (r"final_layernorm\.", "norm."),
        _LAYER,
    ),
    {},
    hidden_first=True,
)
_FAMILIES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _QWEN),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _DEEPSEEK),
    "mimo": _MIMO,
}


def new_head(model: nn.Module, config: dict[str, Any]) -> nn.Module | None:
    """A head for this model, without trained weights; None for an unknown family.

    config: the model's config.json, as mlx-lm completes it.
    """
    family, body = _FAMILIES.get(str(config.get("model_type"))), body_of(model)
    if family is None or body is None:
        return None
    text = config.get("text_config") or config
    one_layer = {"num_hidden_layers": 1, **family.changes}
    changed = {**config, **one_layer}
    if "text_config" in config:
        changed["text_config"] = {**text, **one_layer}
    model_class, args_class = _get_classes(changed)
    head = model_class(args_class.from_dict(changed))
    own: Any = body_of(head)
    if hasattr(own, "ssm_idx"):
        own.ssm_idx = None  # no layer is recurrent
    size, eps = own.norm.weight.size, own.norm.eps
    own.embed_tokens = HeadEmbedding(body.embed_tokens, size, eps, family.hidden_first)
    if "lm_head" in (above := _above(head)):
        above.lm_head = ModelsHead(_above(model).lm_head)
    return head


def read_head(folder: Path, model: nn.Module, config: dict[str, Any]) -> nn.Module | None:
    """The head in a folder for this model, with lazy weights; None if the folder has none.

    Raises ValueError if the head's tensors do not fit the model.
    """
    family, body = _FAMILIES.get(str(config.get("model_type"))), cast(Any, body_of(model))
    if family is None or body is None:
        return None
    weights, adds_one = _weights_of(folder, family, len(body.layers))
    head = new_head(model, config) if weights else None
    if head is None:
        return None
    body = body_of(head)
    (path,) = (path for path, module in head.named_modules() if module is body)
    named = {f"{path}.{name}": weight for name, weight in weights.items()}
    # `sanitize` gets no norms, because it adds one to the norms of some models only.
    norms = {n: w + 1 if adds_one else w for n, w in named.items() if w.ndim == 1 and "norm" in n}
    rest = {n: w for n, w in named.items() if n not in norms}
    loaded = {**norms, **(head.sanitize(rest) if hasattr(head, "sanitize") else rest)}
    nn.quantize(head, class_predicate=partial(_quantisation, loaded))
    head.load_weights(list(loaded.items()))
    return head


def _weights_of(folder: Path, family: _Family, num_layers: int) -> tuple[Weights, bool]:
    """Returns the tensors of a head, by their names in the body of the model of one layer, and
    whether one must be added to its norms."""
    start = re.compile(family.start.replace("{n}", str(num_layers)))
    bare, found, adds_one = Weights(), Weights(), False
    for file in sorted(folder.glob("*.safetensors")):
        arrays, metadata = cast(Any, mx.load(str(file), return_metadata=True))
        for name, weight in arrays.items():
            bare[name] = weight
            if (match := start.match(name)) is not None:
                found[name[match.end() :]] = weight
                adds_one = family.minus_one and metadata.get("format") != "mlx"
    # In a folder of its own, a converted head's names may lack their start.
    if not found and any(re.match(family.names[0][0], name) for name in bare):
        found = bare
    named = ((_renamed(name, family), weight) for name, weight in found.items())
    return {name: weight for name, weight in named if name}, adds_one


def _renamed(name: str, family: _Family) -> str:
    for old, new in family.names:
        if (match := re.match(old, name)) is not None:
            return new and new + name[match.end() :]
    return name


def _above(model: nn.Module) -> Any:
    """The module that holds the body."""
    body = body_of(model)
    return next(m for m in model.modules() if any(part is body for part in m.children().values()))


def _quantisation(weights: Weights, path: str, module: nn.Module) -> Any:
    """How a layer is quantised in the files: the `class_predicate` of `nn.quantize`."""
    if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
        return False
    return infer_quant_config(path, module, weights)
