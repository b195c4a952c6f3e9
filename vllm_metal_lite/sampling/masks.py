"""Limits on the tokens of a row: masks over the vocabulary, and the interface that makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Constraint(Protocol):
    """The tokens that may continue one answer.  Its state follows the answer's tokens."""

    def fill(self, bits: np.ndarray) -> bool:
        """Write the tokens that may come next, (ceil(V / 32),) uint32 as in TokenMasks.

        False: any token may come next; `bits` is unchanged.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Record the answer's next token, sampled or forced."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens, because their step failed."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, in order; [] if there is a choice."""
        ...

    def error(self) -> str:
        """The error of a constraint that has failed: no token may come next.  "": it works."""
        ...
