"""Reads a model's folder: the module, its tokenizer and the settings beside them.

A bad entry of generation_config.json is ignored with a warning, so that every model loads that
mlx-lm loads.
"""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _get_classes, load_model

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError, SamplingError
from vllm_metal_lite.model.files.folder import (
    Weights,
    loading,
    read_config,
    read_json,
    remote_code_error,
)
from vllm_metal_lite.model.files.inner_model import inner_classes
from vllm_metal_lite.model.files.tokenizer import read_tokenizer
from vllm_metal_lite.model.layer_weights import set_dtype
from vllm_metal_lite.rules import flags_of
from vllm_metal_lite.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Architectures with wrong results in mlx-lm itself, and the reason.
_REFUSED = {
    "plamo3": "its decoding from a cache is wrong in mlx-lm itself",
    "phi3small": "in mlx-lm the tokens of a prompt see later tokens",
}

_HEAD = "lm_head.weight"


def read_model(
    folder: Path, name: str, dtype: str, trust_remote_code: bool
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any], str | None]:
    """Returns (module, tokenizer, config.json, why the model gives no text).

    The weights of the module are not read yet.  The reason is None if the model gives text.
    dtype, trust_remote_code: see `load`.  Every failure is a ModelLoadError of one line.
    """
    config = read_config(folder, name)
    refuse_wrong(name, str(config.get("model_type")))
    if config.get("model_file") and not trust_remote_code:
        raise remote_code_error(name, "architecture", folder)
    with loading(name, "this model"):
        model, config, has_head = load_checkpoint(folder, trust_remote_code)
        tokenizer = read_tokenizer(name, folder, config, trust_remote_code)
        if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
            raise ModelLoadError("it has no tokenizer files")
        set_dtype(model, dtype)
        problem = None if has_head else "its files have no lm_head.weight: it is for embeddings"
        return model, tokenizer, config, problem


def refuse_wrong(name: str, model_type: str) -> None:
    """Raise ModelLoadError for an architecture that is wrong in mlx-lm itself."""
    if model_type in _REFUSED:
        raise ModelLoadError(f"{name}: {model_type} is not supported: {_REFUSED[model_type]}")


def load_checkpoint(
    folder: Path, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any], bool]:
    """Returns (module, config.json, whether the files have a head).  The weights are not read yet.

    Some files that mlx-lm refuses are accepted.  Their names may lack `model.`, as in
    Qwen3-Embedding.  They may have a head that equals the embedding, if the module has no head.  In
    a folder for embeddings they may have no head.  A type with a vision tower that mlx-lm does not
    know runs the model inside.  For other files mlx-lm's error is raised.
    """
    has_head = True

    def classes(config: dict[str, Any]) -> Any:
        model_class, args_class = _get_classes(config)

        class Tolerant(model_class):  # type: ignore[valid-type, misc]
            def sanitize(self, weights: Weights) -> Weights:
                nonlocal has_head
                own = getattr(super(), "sanitize", dict)
                weights, expected = (
                    own(_with_prefix(weights, self)),
                    dict(tree_flatten(self.parameters())),
                )
                for head in [n for n in weights if n.endswith(_HEAD) and n not in expected]:
                    others = _like(weights[head], weights)
                    if any(mx.array_equal(weights[head], weights[n]) for n in others):
                        del weights[head]
                if expected.keys() - weights.keys() == {_HEAD} and _is_pooling(folder):
                    [embedding] = _like(expected[_HEAD], weights)
                    weights[_HEAD], has_head = weights[embedding], False
                return weights

        return Tolerant, args_class

    try:
        return *load_model(folder, lazy=True, trust_remote_code=trust_remote_code), True
    except Exception:
        with suppress(Exception):
            model, config = load_model(folder, lazy=True, get_model_classes=classes)
            (model.__class__,) = type(model).__bases__
            return model, config, has_head
        with suppress(Exception):
            return *load_model(folder, lazy=True, get_model_classes=inner_classes(folder)), True
        raise


def _with_prefix(weights: Weights, model: nn.Module) -> Weights:
    """The weights with `model.` before all names but a head's, if `model.model` has them."""
    inner, rest = model.children().get("model", ()), {n for n in weights if "lm_head." not in n}
    is_bare = all(name.partition(".")[0] in inner for name in rest)
    return {f"model.{n}" if is_bare and n in rest else n: w for n, w in weights.items()}


def _like(head: mx.array, weights: Weights) -> list[str]:
    """The names of weights that have a head's shape and are no head: the embedding."""
    return [n for n, w in weights.items() if w.shape == head.shape and not n.endswith(_HEAD)]


def _is_pooling(folder: Path) -> bool:
    modules = read_json(folder / "modules.json", list)
    return any(str(module.get("type")).endswith("Pooling") for module in modules)


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """SamplingParams fields that the model asks for."""
    path, fields = folder / "generation_config.json", {}
    try:
        config = read_json(path)
    except ModelLoadError as e:
        logger.warning(f"{path.parent}/{e}: the file is ignored")
        return {}
    for name in flags_of(SamplingParams):
        if (value := config.get(name)) is not None:
            try:
                fields[name] = getattr(SamplingParams(**{name: value}), name)
            except SamplingError as e:
                logger.warning(f"{path}: {e}: the value is ignored")
    if config.get("do_sample") is False:
        fields["temperature"] = 0.0
    return fields
