"""Loads weights into mlx-lm's module, also from files that differ from its names in a plain way.

- Names without `model.`: a base model was saved, as for Qwen3-Embedding.
- A head that equals the embedding, where the module's head is the embedding.
- No head, in a folder of sentence-transformers: the model is for embeddings alone.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.files.folder import read_json

Weights = dict[str, mx.array]
_HEAD = "lm_head.weight"


def load_checkpoint(
    folder: Path, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any], bool]:
    """(The module, its weights not read yet; config.json; whether the files have a head).

    Raises what mlx-lm raises: files that mlx-lm itself loads are left to it, and others are strict
    too, so each weight has one place.
    """
    heads_made: list[str] = []

    def classes(config: dict[str, Any]) -> Any:
        model_class, args_class = _get_classes(config)

        def build(args: Any) -> nn.Module:
            model = model_class(args)
            own: Callable[[Weights], Weights] = getattr(model, "sanitize", dict)

            def sanitize(weights: Weights) -> Weights:
                weights = _without_tied_head(own(_with_prefix(weights, model)), model)
                expected = dict(tree_flatten(model.parameters()))
                if expected.keys() - weights.keys() == {_HEAD} and _is_pooling(folder):
                    weights |= _embedding_as(_HEAD, expected[_HEAD].shape, weights, model)
                    heads_made.append(_HEAD)
                return weights

            model.sanitize = sanitize
            return model

        return build, args_class

    try:
        return *load_model(folder, lazy=True, trust_remote_code=trust_remote_code), True
    except Exception:
        with suppress(Exception):
            model, config = load_model(folder, lazy=True, get_model_classes=classes)
            del model.sanitize
            return model, config, not heads_made
        raise


def _with_prefix(weights: Weights, model: nn.Module) -> Weights:
    """The weights with `model.` before all names but a head's, if `model.model` has them."""
    inner, rest = model.children().get("model", ()), {n for n in weights if "lm_head." not in n}
    is_bare = all(name.partition(".")[0] in inner for name in rest)
    return {f"model.{n}" if is_bare and n in rest else n: w for n, w in weights.items()}


def _without_tied_head(weights: Weights, model: nn.Module) -> Weights:
    """The weights without a head that the module lacks, if that equals the embedding."""
    expected = dict(tree_flatten(model.parameters()))
    for head in [n for n in weights if n.endswith(_HEAD) and n not in expected]:
        tied = _embedding_as(head, weights[head].shape, weights, model)
        if all(n in weights and mx.array_equal(weights[n], w).item() for n, w in tied.items()):
            weights = {n: w for n, w in weights.items() if n not in tied}
    return weights


def _embedding_as(head: str, shape: tuple, weights: Weights, model: nn.Module) -> Weights:
    """The embedding's weight, scales and biases under a head's names; {}: there is not exactly one
    embedding of the head's shape, plain or as the file has it."""
    found = [
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and shape in (module.weight.shape, weights.get(f"{path}.weight", module.weight).shape)
    ]
    ours, parts = head.removesuffix("weight"), ("weight", "scales", "biases")
    names = {ours + part: found[0] + part for part in parts} if len(found) == 1 else {}
    return {name: weights[other] for name, other in names.items() if other in weights}


def _is_pooling(folder: Path) -> bool:
    modules = read_json(folder / "modules.json", list)
    return any(str(module.get("type")).endswith("Pooling") for module in modules)
