"""Masks over the vocabulary: the tokens that a row of a step may have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenMasks:
    """The tokens allowed in R rows of a step, in the format of grammar libraries (xgrammar).

    rows: (R,) int, distinct rows of the logits.  bits: (R, ceil(V / 32)) int32 or uint32; bit i of
    word j, counted from the low end, represents token 32 * j + i.
    """

    rows: np.ndarray
    bits: np.ndarray


def pack_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """(ceil(V / 32),) uint32: the bits of these tokens; ids outside the vocabulary are ignored."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    allowed[[t for t in token_ids if 0 <= t < vocab_size]] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)
