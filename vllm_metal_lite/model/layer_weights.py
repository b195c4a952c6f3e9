"""A model's weights: their types, and the weights of its layers as the kernels take them."""

import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwiGLU,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.experts import Activation, Experts, ExpertWeight, experts_problem
from vllm_metal_lite.kernels.weight_formats import QuantisedWeight, Weight, readable
from vllm_metal_lite.specs import Quantisation

_LINEAR = nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding
# mlx-lm's mixtures of experts.
MIXTURES = (SwitchGLU, SwitchMLP)


def weight_of(layer: nn.Module) -> Weight:
    """The weight (outputs, inputs) of a linear layer, or of an embedding used as one; (experts,
    outputs, inputs) of a layer of experts."""
    if "scales" not in layer:
        return layer["weight"]
    how = Quantisation(layer.bits, layer.group_size, layer.mode)
    return QuantisedWeight(layer["weight"], layer["scales"], layer.get("biases"), how)


def product_weights(model: nn.Module) -> list[Weight]:
    """A model's weights that `skinny_gemm` supports, including those of embeddings."""
    layers = (m for m in model.modules() if isinstance(m, _LINEAR))
    return [weight for weight in map(weight_of, layers) if readable(weight)]


def served(layer: nn.Module) -> Experts | None:
    """The experts of a mixture, if the kernels support them."""
    experts = _experts_of(layer)
    return experts if experts is not None and experts_problem(experts) is None else None


def _experts_of(layer: nn.Module) -> Experts | None:
    """The experts of a mixture with an activation and layers of known kinds."""
    how = _activation_of(layer)
    if how is None:
        return None
    if isinstance(layer, SwitchMLP):
        one, down = map(_expert_weight_of, (layer.fc1, layer.fc2))
        return Experts(one, None, down, how) if one and down else None
    gate, up, down = map(_expert_weight_of, (layer.gate_proj, layer.up_proj, layer.down_proj))
    return Experts(gate, up, down, how) if gate and up and down else None


def _activation_of(layer: nn.Module) -> Activation | None:
    activation = layer.activation
    if isinstance(layer, SwitchMLP):
        return Activation("relu2") if type(activation) is nn.ReLU2 else None
    if type(activation) is SwigluOAI:
        return Activation("clamped_swiglu", activation._alpha, activation._limit)
    if type(activation) is SwiGLU:
        return Activation()
    return Activation("geglu") if type(activation) is GeGLU else None


def _expert_weight_of(layer: nn.Module) -> ExpertWeight | None:
    plain = type(layer) in (SwitchLinear, QuantizedSwitchLinear)
    if not plain or layer.get("global_scale") is not None:
        return None
    return ExpertWeight(weight_of(layer), layer.get("bias"))


def mixtures(model: nn.Module) -> list[tuple[nn.Module, Experts]]:
    """A model's mixtures of experts that the kernels support: pairs of (layer, experts)."""
    layers = (m for m in model.modules() if isinstance(m, MIXTURES))
    return [(layer, experts) for layer in layers if (experts := served(layer))]


# Exact types: a subclass computes something else, and stays packed.
_PLAIN: dict[type, type] = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
}


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Give all floats of a model one type; those that mlx-lm does not round stay as they are."""
    may_round = getattr(model, "cast_predicate", lambda path: True)

    def typed(path: str, w: mx.array) -> mx.array:
        # MLX takes the scale of nvfp4 experts in float32 alone.
        keep = path.endswith("global_scale") or not (dtype == mx.float32 or may_round(path))
        return w if keep or not mx.issubdtype(w.dtype, mx.floating) else w.astype(dtype)

    model.update(tree_map_with_path(typed, model.parameters()))


def set_dtype(model: nn.Module, dtype: str) -> None:
    """Give the weights the type that `load` was asked for; "auto": the files' own, or float32 on a
    CPU."""
    if dtype != "auto":
        cast(model, getattr(mx, dtype))
    elif backend.is_cpu():
        expand(model)


def expand(model: nn.Module) -> None:
    """Make all weights float32, quantised ones too: MLX's CPU backend is fast in no other type."""
    cast(model, mx.float32)  # first: scales of 16 bits would round the weights
    for module in model.modules():
        if type(module) in _PLAIN:
            _expand(module)


def _expand(module: nn.Module) -> None:
    """Turn a quantised layer into the plain one whose weight its parameters represent."""
    # mlx-lm takes a layer with `bits` for a packed one.
    size, bits, mode = (vars(module).pop(name) for name in ("group_size", "bits", "mode"))
    scale = module.pop("global_scale", None)  # one per expert, and MLX takes one per call
    weight = mx.dequantize(
        module.weight,
        module.pop("scales"),
        module.pop("biases", None),
        size,
        bits,
        mode,
        None if scale is None else mx.array(1.0),
        mx.float32,
    )
    module.weight = weight if scale is None else weight * scale[:, None, None]
    module.__class__ = _PLAIN[type(module)]
