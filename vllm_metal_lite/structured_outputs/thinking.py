"""Free thoughts before an answer of a given form, perhaps with a budget."""

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from vllm_metal_lite.sampling.constraint import Constraint
from vllm_metal_lite.sampling.masks import pack_mask
from vllm_metal_lite.structured_params import ThinkingParams


class _Phase(Enum):
    BEFORE = auto()  # thoughts may begin, or the answer
    STARTING = auto()  # within the start marker
    THINKING = auto()
    ENDING = auto()  # the end marker is being forced
    OVER = auto()


class Thinking:
    """A `Constraint`: thoughts are free, then `inner` applies.

    inner: the constraint of the answer after its thoughts; None: no limit.  With `inner`, the
    answer cannot end within its thoughts.
    """

    def __init__(
        self,
        params: ThinkingParams,
        inner: Constraint | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._start, self._end = tuple(params.start), tuple(params.end)
        self._budget, self._inner, self._vocab_size = params.budget, inner, vocab_size
        self._no_end = ~pack_mask(eos_token_ids, vocab_size)
        phase = _Phase.BEFORE if self._start else _Phase.OVER
        if params.is_open:
            phase = _Phase.THINKING
        # (phase, its tokens so far) before each token; the last entry is the current one.
        self._states = [(phase, 0)]
        self._tokens: list[int] = []
        self._check_budget()

    def fill(self, bits: np.ndarray) -> bool:
        phase, _ = self._states[-1]
        if phase is _Phase.OVER:
            return self._inner is not None and self._inner.fill(bits)
        if phase in (_Phase.STARTING, _Phase.ENDING):
            bits[:] = pack_mask(self.forced()[:1], self._vocab_size)
            return True
        if phase is _Phase.THINKING:
            bits[:] = self._no_end
            return self._inner is not None
        if self._inner is None or not self._inner.fill(bits):
            return False
        if self._budget != 0:
            bits |= pack_mask(self._start[:1], self._vocab_size)
        return True

    def forced(self) -> list[int]:
        phase, count = self._states[-1]
        if phase is _Phase.STARTING:
            return list(self._start[count:])
        if phase is _Phase.ENDING:
            return list(self._end[count:])
        if phase is _Phase.OVER and self._inner is not None:
            return self._inner.forced()
        return []

    def accept(self, token_id: int) -> None:
        phase, count = self._states[-1]
        if phase is _Phase.BEFORE:
            phase = _Phase.STARTING if token_id == self._start[0] else _Phase.OVER
            count = 0
        if phase is _Phase.OVER and self._inner is not None:
            self._inner.accept(token_id)
        self._tokens.append(token_id)
        count += 1
        if phase is _Phase.STARTING and count == len(self._start):
            phase, count = _Phase.THINKING, 0
        elif (phase is _Phase.ENDING and count == len(self._end)) or (
            phase is _Phase.THINKING and tuple(self._tokens[-len(self._end) :]) == self._end
        ):
            phase, count = _Phase.OVER, 0
        self._states.append((phase, count))
        self._check_budget()

    def rollback(self, num_tokens: int) -> None:
        lost = self._states[-num_tokens - 1 : -1]
        # BEFORE: the token belonged to the answer if thoughts did not begin with it.
        inner = sum(
            phase is _Phase.OVER or (phase is _Phase.BEFORE and token != self._start[0])
            for (phase, _), token in zip(lost, self._tokens[-num_tokens:], strict=True)
        )
        if inner and self._inner is not None:
            self._inner.rollback(inner)
        del self._states[-num_tokens:], self._tokens[-num_tokens:]

    def _check_budget(self) -> None:
        phase, count = self._states[-1]
        if phase is _Phase.THINKING and self._budget is not None and count >= self._budget:
            self._states[-1] = (_Phase.ENDING, 0)
