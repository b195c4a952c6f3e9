"""Masks over the vocabulary: the tokens that a row of a step may have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.backend import mx


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


class DeviceMasks:
    """TokenMasks on the device.  A mask may be applied in many steps."""

    def __init__(self, masks: TokenMasks, num_rows: int) -> None:
        order = np.argsort(masks.rows)
        is_all = len(masks.rows) == num_rows
        self.rows = None if is_all else mx.array(masks.rows[order].astype(np.int32))
        self.bits = mx.array(np.ascontiguousarray(masks.bits[order]).view(np.uint32))

    def apply(self, x: mx.array) -> mx.array:
        """Logits (T, V) with -inf for tokens that are not allowed, or beyond the mask's end."""
        bits = (self.bits[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        may = bits.reshape(len(bits), -1)[:, : x.shape[1]]
        if may.shape[1] < x.shape[1]:
            may = mx.pad(may, [(0, 0), (0, x.shape[1] - may.shape[1])])
        y = x if self.rows is None else x[self.rows]
        y = mx.where(may == 1, y, mx.array(-mx.inf, x.dtype))
        return y if self.rows is None else mx.put_along_axis(x, self.rows[:, None], y, axis=0)
