"""The types of a model's weights: cast, or expanded from a quantised format."""

import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vllm_metal_lite.backend import mx

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


def expand(model: nn.Module) -> None:
    """Make all weights float32, quantised ones too: MLX's CPU backend is fast in no other type."""
    cast(model, mx.float32)  # first: scales of 16 bits would round the weights
    for module in model.modules():
        if type(module) in _PLAIN:
            _expand(module)


def _expand(module: nn.Module) -> None:
    """Make a quantised layer the plain one with the weight that its parameters represent."""
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
