"""The operations of a model besides attention: rotations, norms, and products of few rows.

Observed while the model runs: its modules differ, but all call mx.fast.rope and mx.fast.rms_norm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.weights import QuantisedWeight, Weight, readable
from vllm_metal_lite.model.seam.hooks import Hook, hooked
from vllm_metal_lite.model.seam.scaling import ScalingAt
from vllm_metal_lite.specs import Quantisation, RopeShape


class Usage:
    """Records the norms and rotations of a model's forwards.

    hidden_sizes: sizes of the normalised rows, except heads.
    """

    def __init__(self) -> None:
        self.hidden_sizes: dict[int, None] = {}
        self._head_norms: dict[int, float] = {}  # head size -> eps
        self._ropes: dict[tuple[int, RopeShape], None] = {}
        # The newest scaled heads: the array, how many leading elements were scaled, the factor.
        self._scaled: tuple[mx.array, int, float] | None = None

    @property
    def ropes(self) -> tuple[RopeShape, ...]:
        found = {replace(r, eps=self._head_norms.get(head_dim)) for head_dim, r in self._ropes}
        return tuple(sorted(found, key=str))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the calls of everything that runs meanwhile."""
        fast, array = mx.fast, mx.array
        hooks: list[Hook] = [
            (fast, "rms_norm", partial(self._rms_norm, fast.rms_norm)),
            (fast, "rope", partial(self._rope, fast.rope)),
            (array, "at", self._at(array.at)),
            *((array, name, self._mul(getattr(array, name))) for name in ("__mul__", "__rmul__")),
        ]
        try:
            with hooked(hooks):
                yield
        finally:
            self._scaled = None

    def _rms_norm(
        self, original: Callable, x: mx.array, weight: mx.array | None, eps: float, **kwargs: Any
    ) -> mx.array:
        if x.ndim == 4:
            self._head_norms[x.shape[-1]] = eps
        else:
            self.hidden_sizes[x.shape[-1]] = None
        return original(x, weight, eps, **kwargs)

    def _rope(self, original: Callable, x: mx.array, dims: int, **how: Any) -> mx.array:
        angles = how["traditional"], how["base"], how["scale"]
        scaled, count, factor = self._scaled or (None, 0, 1.0)
        factor = factor if scaled is x and count == dims else 1.0  # of the first `dims` elements
        rope = RopeShape(dims, *angles, factor=factor)
        self._ropes[x.shape[-1], rope] = None
        return original(x, dims, **how)

    def _note(self, scaled: mx.array, dims: int, factor: float) -> mx.array:
        self._scaled = scaled, dims, factor
        return scaled

    def _at(self, original: Any) -> Any:
        return property(lambda x: ScalingAt(x, original.fget(x), self._note))

    def _mul(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def mul(x: mx.array, y: Any) -> Any:
            value = original(x, y)
            heads = isinstance(y, float) and x.ndim == 4
            return self._note(value, x.shape[-1], y) if heads else value

        return mul


_LINEAR = nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding


def weight_of(layer: nn.Module) -> Weight:
    """The weight (outputs, inputs) of a linear layer, or of an embedding used as one; (experts,
    outputs, inputs) of a layer of experts."""
    if "scales" not in layer:
        return layer["weight"]
    how = Quantisation(layer.bits, layer.group_size, layer.mode)
    return QuantisedWeight(layer["weight"], layer["scales"], layer.get("biases"), how)


def product_weights(model: nn.Module) -> list[Weight]:
    """The weights that `skinny_gemm` supports, those of embeddings included."""
    layers = (m for m in model.modules() if isinstance(m, _LINEAR))
    return [weight for weight in map(weight_of, layers) if readable(weight)]
