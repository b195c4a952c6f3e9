"""Quantised weights by definition, in float64."""

import numpy as np

from tests.support.kernels.arrays import floats
from vllm_metal_lite.kernels.weight_formats import QuantisedWeight


def dequantised(weight: QuantisedWeight) -> np.ndarray:
    """The values (outputs, depth) before they are rounded to any type."""
    bits, group_size, mode = weight.quantisation
    codes = _codes(np.array(weight.words), bits)
    scales = _scales(weight).repeat(group_size, 1)
    if mode != "affine":
        return scales * _small_floats(codes, *((2, 1) if bits == 4 else (4, 3)))
    assert weight.biases is not None
    return scales * codes + floats(weight.biases).repeat(group_size, 1)


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of a row, which is a run of bits; the first code has the lowest bits."""
    run = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return run.reshape(len(words), -1, bits) @ (1 << np.arange(bits))


def _small_floats(codes: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """The numbers of e2m1 or e4m3: sign, exponent and mantissa, with subnormals, no infinities."""
    mantissa = codes % (1 << mantissa_bits)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    sign = 1 - 2 * (codes >> exponent_bits + mantissa_bits)
    whole = np.where(exponent > 0, 1 << mantissa_bits, 0) + mantissa
    least = 2 - (1 << exponent_bits - 1) - mantissa_bits
    return sign * whole * 2.0 ** (np.maximum(exponent, 1) - 1 + least)


def _scales(weight: QuantisedWeight) -> np.ndarray:
    mode = weight.quantisation.mode
    if mode == "affine":
        return floats(weight.scales)
    codes = np.array(weight.scales).astype(int)
    return _small_floats(codes, 4, 3) if mode == "nvfp4" else 2.0 ** (codes - 127)
