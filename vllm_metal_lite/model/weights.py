"""The weights of a model's linear layers, as the kernels take them."""

import mlx.nn as nn

from vllm_metal_lite.kernels.weights import QuantisedWeight, Weight, readable
from vllm_metal_lite.specs import Quantisation

_LINEAR = nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding


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
