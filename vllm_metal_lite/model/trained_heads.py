"""Heads that were trained with a model to draft its tokens (multi-token prediction).

mlx-lm leaves their weights out.  They are in the model's folder, or in a folder of their own.  The
tensors decide, because config.json often names a head that a conversion has dropped.

A head is read as a small model of the model's own class, with the head's layers only.  Its
embedding is a `HeadEmbedding`, and the model's LM head makes its logits.

vLLM's files *_mtp.py (vllm/model_executor/models) have the names and the order of operations:
qwen3_5, qwen3_next, deepseek, glm4_moe, glm4_moe_lite, bailing_moe, bailing_moe_v3, mimo, mimo_v2,
exaone_moe, nemotron_h and ernie.  Two things differ here.  Ernie's layer and norms follow its
training (PaddleFormers, ernie4_5_moe/modeling.py); vLLM leaves the last norm out, and rotates as
Llama does.  In some families vLLM replaces the embedding of a request's first row by zeros; this
code does not.
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
from vllm_metal_lite.model.seam.head_embedding import HeadEmbedding, ModelsLayer


class _Family(NamedTuple):
    """How models name the tensors of their heads.

    start: a regular expression for the start of a name; {n} is the number of layers.
    joined: regular expressions for the parts of HeadEmbedding: norm_embedding, norm_hidden, fc.
    names: pairs (regular expression for the rest of a name, what replaces the match); the first
    match counts, and an empty replacement leaves the tensor out.  The result is a name in the body
    of the head's model.
    changes: the fields of config.json that differ in the head's model: values, or functions of the
    model's configuration.
    embedding: the name of the embedding in the body.  hidden_first: see HeadEmbedding.
    minus_one: files store the weights of norms minus one, unless an MLX conversion has added the
    one.  before_norm: the head reads hidden states from before the model's final norm, and uses
    this norm as its own last one.
    """

    start: str
    joined: tuple[str, str, str]
    names: tuple[tuple[str, str], ...]
    changes: dict[str, Any]
    embedding: str = "embed_tokens"
    hidden_first: bool = False
    minus_one: bool = False
    before_norm: bool = False

    def renamed(self, name: str) -> str:
        """A tensor's name in the body of the head's model.  name: in the file, after its start."""
        parts = zip(self.joined, ("norm_embedding", "norm_hidden", "fc"), strict=True)
        joined = ((rf"{old}\.", f"{self.embedding}.{new}.") for old, new in parts)
        for old, new in (*joined, *self.names):
            if (match := re.match(old, name)) is not None:
                return new and new + name[match.end() :]
        return name


_LAYER = ("", "layers.0.")
_QWEN = _Family(
    r"(language_model\.|model\.)*mtp\.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"),
    (),
    {"full_attention_interval": 1, "mlp_only_layers": []},
    minus_one=True,
)
_EXAONE = _QWEN._replace(
    changes={
        "is_moe_layer": [False],
        "layer_types": lambda text: (text.get("mtp_layer_types") or text["layer_types"])[:1],
    },
    minus_one=False,
)
_DEEPSEEK = _Family(
    r"(language_model\.)?model\.layers\.{n}\.",
    ("enorm", "hnorm", "eh_proj"),
    (
        (r"(shared_head\.norm|final_layernorm)\.", "norm."),
        (r"shared_head\.head\.|embed_tokens\.|.*rotary_emb\.", ""),
        _LAYER,
    ),
    {"first_k_dense_replace": 0},
)
_BAILING = _DEEPSEEK._replace(
    changes={"first_k_dense_replace": 0, "layer_group_size": 1}, embedding="word_embeddings"
)
_MIMO = _Family(
    r"model\.mtp_layers\.0\.",
    ("token_layernorm", "hidden_layernorm", "input_proj"),
    ((r"final_layernorm\.", "norm."), _LAYER),
    {},
    hidden_first=True,
)
_MIMO_V2 = _Family(
    r"model\.mtp\.layers\.0\.",  # the other two of its heads are left out, as in vLLM
    _DEEPSEEK.joined,
    (
        (r"final_layernorm\.", "norm."),
        (r"pre_mlp_layernorm\.", "layers.0.post_attention_layernorm."),
        _LAYER,
    ),
    {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0]},
)
_NEMOTRON = _Family(
    r"(language_model\.)?mtp\.",
    (r"layers\.0\.enorm", r"layers\.0\.hnorm", r"layers\.0\.eh_proj"),
    ((r"layers\.1\.final_layernorm\.", "norm_f."),),
    {"hybrid_override_pattern": ["*", "E"]},
    embedding="embeddings",
)
_ERNIE = _Family(
    r"model\.mtp_",
    (r"emb_norm\.0", r"hidden_norm\.0", r"linear_proj\.0"),
    ((r"block\.0\.", "layers.0."),),
    {"moe_layer_start_index": 1},
    before_norm=True,
)
_FAMILIES = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _QWEN),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32"), _DEEPSEEK),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _DEEPSEEK),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_v3"), _BAILING),
    "ernie4_5_moe": _ERNIE,
    "exaone_moe": _EXAONE,
    "mimo": _MIMO,
    "mimo_v2_flash": _MIMO_V2,
    "nemotron_h": _NEMOTRON,
}


def new_head(model: nn.Module, config: dict[str, Any]) -> nn.Module | None:
    """A head for this model, without trained weights; None for an unknown family.

    config: the model's config.json, as mlx-lm completes it.
    """
    family, body = _FAMILIES.get(str(config.get("model_type"))), cast(Any, body_of(model))
    if family is None or body is None:
        return None
    text = config.get("text_config") or config
    changes = {k: v(text) if callable(v) else v for k, v in family.changes.items()}
    changes["num_hidden_layers"] = 1
    changed = {**config, **changes}
    if "text_config" in config:
        changed["text_config"] = {**text, **changes}
    model_class, args_class = _get_classes(changed)
    head = model_class(args_class.from_dict(changed))
    own: Any = body_of(head)
    # mlx-lm makes a mask for each kind of layer from the cache of one.  For kinds that the head
    # lacks it makes none, because `cache[slice(0)]` is empty.
    for index in {"ssm_idx", "ga_idx"} & set(vars(own)):
        setattr(own, index, slice(0))
    norm = next(part for part in own.children().values() if isinstance(part, nn.RMSNorm))
    final_norm = body.norm if family.before_norm else None
    if final_norm is not None:
        own.norm = ModelsLayer(final_norm)
    embedding, size = getattr(body, family.embedding), norm.weight.size
    inputs = HeadEmbedding(embedding, size, norm.eps, family.hidden_first, final_norm)
    setattr(own, family.embedding, inputs)
    if "lm_head" in (parent := _parent_of_body(head)):
        parent.lm_head = ModelsLayer(_parent_of_body(model).lm_head)
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
    # Norms bypass `sanitize`: for some models it adds one to them, and it does not know heads.
    norms = {n: w + 1 if adds_one else w for n, w in named.items() if w.ndim == 1 and "norm" in n}
    rest = {n: w for n, w in named.items() if n not in norms}
    loaded = {**norms, **(head.sanitize(rest) if hasattr(head, "sanitize") else rest)}
    nn.quantize(head, class_predicate=partial(_quantisation, loaded))
    head.load_weights(list(loaded.items()))
    return head


def _weights_of(folder: Path, family: _Family, num_layers: int) -> tuple[Weights, bool]:
    """Returns the tensors of a head, by their names in the body of its model, and whether one must
    be added to its norms.

    num_layers: the model's.
    """
    start = re.compile(family.start.replace("{n}", str(num_layers)))
    everything, found, adds_one = Weights(), Weights(), False
    for file in sorted(folder.glob("*.safetensors")):
        arrays, metadata = cast(Any, mx.load(str(file), return_metadata=True))
        for name, weight in arrays.items():
            everything[name] = weight
            if (match := start.match(name)) is not None:
                found[name[match.end() :]] = weight
                adds_one = family.minus_one and metadata.get("format") != "mlx"
    # In a folder of its own, a converted head's names may lack their start.
    if not found and any(re.match(family.joined[0], name) for name in everything):
        found = everything
    named = ((family.renamed(name), weight) for name, weight in found.items())
    return {name: weight for name, weight in named if name}, adds_one


def _parent_of_body(model: nn.Module) -> Any:
    body = body_of(model)
    return next(m for m in model.modules() if any(part is body for part in m.children().values()))


def _quantisation(weights: Weights, path: str, module: nn.Module) -> Any:
    """How a layer is quantised in the files: the `class_predicate` of `nn.quantize`."""
    if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
        return False
    return infer_quant_config(path, module, weights)
