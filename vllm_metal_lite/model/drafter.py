"""Gives a model a drafter: a head that was trained with it, or a smaller model.

The drafter's layers follow the model's own in the store.  So they have the same blocks, and prefix
cache, preemption and the disk serve them, too.
"""

import logging
from dataclasses import replace
from pathlib import Path

from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model.files.find import find
from vllm_metal_lite.model.files.folder import loading
from vllm_metal_lite.model.layer_weights import set_dtype
from vllm_metal_lite.model.loader import LoadedModel, from_model, load
from vllm_metal_lite.model.packed import Mode, body_of
from vllm_metal_lite.model.trained_heads import read_head

logger = logging.getLogger(__name__)


def with_drafter(
    model: LoadedModel, name: str | None, dtype: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """The model with the drafter that `name` names; None: with the head in its own folder, if there
    is one and it fits.

    dtype, trust_remote_code: see `load`.  Raises ModelLoadError, with the reason, if the named
    drafter does not fit the model.
    """
    if name is None:
        try:
            head = None if model.folder is None else _head(model, model.folder, dtype)
            return model if head is None else attach(model, head)
        except ModelLoadError as e:
            logger.warning(f"{e}; drafts are looked up alone")
            return model
    return attach(model, _head(model, find(name), dtype) or load(name, dtype, trust_remote_code))


def _head(model: LoadedModel, folder: Path, dtype: str) -> LoadedModel | None:
    """The trained head in a folder; None if there is none."""
    with loading(model.name, f"the trained head in {folder}"):
        head = read_head(folder, model.packed.model, model.config)
        if head is None:
            return None
        set_dtype(head, dtype)
        return from_model(head, None, model.config, f"the head of {model.name}")


def attach(model: LoadedModel, drafter: LoadedModel) -> LoadedModel:
    """The model with this drafter, whose layers follow the model's in the store."""
    if (problem := _problem(model, drafter)) is not None:
        raise ModelLoadError(f"{drafter.name} cannot draft for {model.name}: {problem}")
    drafter.packed.first_layer = len(model.packed.layout.specs)
    weight_bytes = model.weight_bytes + drafter.weight_bytes
    return replace(model, drafter=drafter, weight_bytes=weight_bytes)


def _problem(model: LoadedModel, drafter: LoadedModel) -> str | None:
    """Why one model cannot draft for the other; None if it can."""
    packed = drafter.packed
    if packed.layout.states:
        return "it keeps recurrent states"
    # A head's one layer may run by segment; a whole model would be too slow to gain.
    if packed.mode is not Mode.PACKED and not packed.takes_hidden:
        return packed.reason
    if body_of(packed.model) is None:
        return "its hidden states cannot be read"
    if packed.takes_hidden:
        same = packed.layout.vocab_size == model.vocab_size
        return None if same else "its head has another vocabulary"
    if model.tokenizer is None or drafter.tokenizer is None:
        return "without a tokenizer, their tokens cannot be compared"
    same = model.tokenizer.get_vocab() == drafter.tokenizer.get_vocab()
    return None if same else "its tokenizer has other tokens"
