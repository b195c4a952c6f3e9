"""Weights of products as kernels read them: 16-bit floats, or as `mx.quantize` makes them."""

from dataclasses import dataclass

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Template
from vllm_metal_lite.specs import Quantisation, WeightShape

# WeightFormat in metal/weights.h.
_WHOLE_VALUES, _AFFINE, _E8M0, _E4M3 = range(4)
_FORMS = {"affine": _AFFINE, "mxfp4": _E8M0, "mxfp8": _E8M0, "nvfp4": _E4M3}
READABLE = (
    *(Quantisation(bits, size) for bits in (4, 6, 8) for size in (32, 64, 128)),
    Quantisation(4, 32, "mxfp4"),
    Quantisation(8, 32, "mxfp8"),
    Quantisation(4, 16, "nvfp4"),
)
_FLOATS = mx.float16, mx.bfloat16
# Bits of a weight -> the chunks of 32 weights in one load.  A lane loads 16 bytes, or 24 if weights
# have 6 bits.
_SPREAD = {16: 1, 8: 2, 6: 4, 4: 4}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight (outputs, depth), or (experts, outputs, depth), as `mx.quantize` returns it.

    words: (outputs, depth * bits / 32) uint32.  scales: (outputs, depth / group_size).  biases: of
    the shape of scales if the mode is "affine", else None.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array | None
    quantisation: Quantisation

    @property
    def shape(self) -> tuple[int, ...]:
        *outputs, words = self.words.shape
        return *outputs, words * 32 // self.quantisation.bits

    @property
    def dtype(self) -> mx.Dtype | None:
        """The type that rows must have, or None if rows may have any type."""
        return self.scales.dtype if self.biases is not None else None


Weight = mx.array | QuantisedWeight


def quantised(weight: mx.array, how: Quantisation) -> QuantisedWeight:
    """A weight (outputs, depth) of floats, quantised."""
    words, scales, *biases = mx.quantize(weight, how.group_size, how.bits, how.mode)
    return QuantisedWeight(words, scales, biases[0] if biases else None, how)


def shape_of(weight: Weight) -> WeightShape:
    *_, outputs, depth = weight.shape
    how = weight.quantisation if isinstance(weight, QuantisedWeight) else None
    return WeightShape(outputs, depth, how)


def spread_of(shape: WeightShape) -> int:
    """How many chunks of 32 weights one load reads."""
    return _SPREAD[shape.quantisation.bits if shape.quantisation else 16]


def readable(weight: Weight) -> bool:
    """Whether the kernels read a weight (outputs, depth)."""
    if not isinstance(weight, QuantisedWeight):
        return weight.dtype in _FLOATS and weight.shape[-1] % 32 == 0
    bits, _, mode = how = weight.quantisation
    return (
        how in READABLE
        and weight.shape[-1] % (64 if bits == 6 else 32) == 0
        and weight.scales.size >= MIN_ELEMENTS
        and (mode == "affine") == (weight.biases is not None)
        and (weight.dtype in _FLOATS if mode == "affine" else weight.scales.dtype == mx.uint8)
    )


def inputs_of(weight: Weight) -> tuple[list[mx.array | None], Template]:
    """The inputs w, scales and biases of a kernel, and template values except SPREAD."""
    if not isinstance(weight, QuantisedWeight):
        plain: Template = {"FORM": _WHOLE_VALUES, "BITS": 16, "GROUP_SIZE": 32}
        return [weight, None, None], plain
    bits, group_size, mode = weight.quantisation
    template: Template = {"FORM": _FORMS[mode], "BITS": bits, "GROUP_SIZE": group_size}
    return [weight.words, weight.scales, weight.biases], template
