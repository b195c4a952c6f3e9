"""Gives a model a drafter: a head that was trained with it, or a smaller model.

The drafter's layers follow the model's own in the store.  So they have the same blocks, and prefix
cache, preemption and the disk serve them, too.
"""

from dataclasses import replace

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model.files.find import find
from vllm_metal_lite.model.files.folder import loading
from vllm_metal_lite.model.layer_weights import cast, expand
from vllm_metal_lite.model.loader import LoadedModel, from_model, load
from vllm_metal_lite.model.packed import Mode, body_of
from vllm_metal_lite.model.trained_heads import read_head


def with_drafter(
    model: LoadedModel, name: str | None, dtype: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """The model with a drafter, which `name` names; None: the head in the model's own folder, if
    there is one.

    dtype, trust_remote_code: see `load`.  Raises ModelLoadError, with the reason, if the drafter
    does not fit the model.
    """
    folder = model.folder if name is None else find(name)
    drafter = None
    with loading(name or model.name, "its trained head"):
        head = None
        if folder is not None:
            head = read_head(folder, model.packed.model, model.config)
        if head is not None:
            if dtype != "auto":
                cast(head, getattr(mx, dtype))
            elif backend.is_cpu():
                expand(head)
            drafter = from_model(head, None, model.config, f"the head of {model.name}")
    if drafter is None:
        if name is None:
            return model
        drafter = load(name, dtype, trust_remote_code)
    return attach(model, drafter)


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
    if packed.mode is not Mode.PACKED or packed.layout.states:
        return packed.reason or "it keeps recurrent states"
    if body_of(packed.model) is None:
        return "its hidden states cannot be read"
    if packed.takes_hidden:
        same = packed.layout.vocab_size == model.vocab_size
        return None if same else "its head has another vocabulary"
    if model.tokenizer is None or drafter.tokenizer is None:
        return "without a tokenizer, their tokens cannot be compared"
    same = model.tokenizer.get_vocab() == drafter.tokenizer.get_vocab()
    return None if same else "its tokenizer has other tokens"
