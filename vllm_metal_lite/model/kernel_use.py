"""What a loaded model asks of the kernels."""

from mlx_lm.models import activations

from vllm_metal_lite.kernels.weights import shape_of
from vllm_metal_lite.model.experts import served_experts
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.seam.hooks import namespaces
from vllm_metal_lite.model.weights import product_weights
from vllm_metal_lite.specs import GatedNormShape, KernelUse, RecurrenceShape


def kernel_use(loaded: LoadedModel, block_size: int) -> KernelUse:
    """Over a store with blocks of block_size tokens."""
    model, usage = loaded.packed.model, loaded.usage
    # mlx-lm uses this function for the gated norm after the gated delta rule.
    gated = namespaces(model, activations.precise_swiglu)
    norms = [
        GatedNormShape(shape.v_dim, shape.v_heads, shape.dtype)
        for shape in usage.recurrences
        if gated and isinstance(shape, RecurrenceShape) and shape.delta
    ]
    return KernelUse(
        shapes=tuple(loaded.attention_shapes),
        block_size=block_size,
        ropes=usage.ropes,
        hidden_sizes=tuple(usage.hidden_sizes),
        weights=tuple(dict.fromkeys(map(shape_of, product_weights(model)))),
        shares_prefix=loaded.packed.no_prefix_cache is None,
        recurrences=(*usage.recurrences, *norms),
        experts=tuple(dict.fromkeys(experts.shape for experts in served_experts(model))),
    )
