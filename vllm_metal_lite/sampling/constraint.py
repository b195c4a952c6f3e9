"""The interface of a limit on one answer's tokens, such as a grammar or a thinking budget."""

from typing import Protocol

import numpy as np


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
