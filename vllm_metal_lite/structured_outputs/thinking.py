"""Thoughts before an answer of a given form, or in channels of the answer, with a budget."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.sampling.constraint import Constraint
from vllm_metal_lite.sampling.masks import pack_mask
from vllm_metal_lite.structured_params import ThinkingParams


class _Phase(Enum):
    BEFORE = auto()  # thoughts may begin, or the answer
    STARTING = auto()  # within the start marker
    THINKING = auto()
    ENDING = auto()  # the end marker is being forced
    OVER = auto()  # no thoughts may begin; never in a channel


class _State(NamedTuple):
    """num_thoughts: tokens of all thoughts so far.  num_written: tokens of the marker at hand.
    num_inner: tokens that `inner` has accepted."""

    phase: _Phase
    num_thoughts: int = 0
    num_written: int = 0
    num_inner: int = 0


class Thinking:
    """A `Constraint`: thoughts with a budget, and `inner`; None: no other limit.

    Without channels, `inner` holds only after the thoughts.  Thoughts may have any token but EOS.
    When the budget is used up, the end marker is forced.

    In a channel, as Harmony has it, thoughts are messages, several in an answer.  `inner` holds for
    them too.  When the budget is used up, forced tokens end the thoughts, and no thoughts begin
    again: the second token of `start`, which names the channel, may not follow the first.  Where
    `inner` does not allow the end of thoughts, such as within a character, thoughts continue until
    `inner` allows it, and `inner` says what follows the first token of the end.
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
        self._is_channel = params.is_channel
        self._not_last = ~pack_mask(eos_token_ids, vocab_size)
        self._ended = _Phase.BEFORE if params.is_channel else _Phase.OVER
        phase = _Phase.BEFORE if self._start else _Phase.OVER
        # Before each token, and now.
        self._states = [_State(_Phase.THINKING if params.is_open else phase)]
        self._tokens: list[int] = []

    def fill(self, bits: np.ndarray) -> bool:
        phase = self._states[-1].phase
        if phase in (_Phase.STARTING, _Phase.ENDING):
            bits[:] = self._mask(self.forced()[0])
            return True
        if phase is _Phase.THINKING and not self._is_channel:
            limited = self._is_spent or self._inner is not None
            if limited:
                bits[:] = self._mask(self._end[0]) if self._is_spent else self._not_last
            return limited
        limited = self._inner is not None and self._inner.fill(bits)
        if not self._is_channel:
            if limited and phase is _Phase.BEFORE and self._budget != 0:
                bits |= self._mask(self._start[0])
        elif self._is_spent and phase is _Phase.THINKING:
            end = self._mask(self._end[0])
            if not limited or (bits & end).any():
                bits[:] = end
            return True
        elif self._is_spent and self._start[:1] == tuple(self._tokens[-1:]):
            others = ~self._mask(*self._start[1:2])
            bits[:] = bits & others if limited else others
            return True
        return limited

    def forced(self) -> list[int]:
        phase, _, num_written, _ = self._states[-1]
        if phase is _Phase.STARTING:
            return list(self._start[num_written:])
        if phase is _Phase.ENDING:
            return list(self._end[num_written:])
        if phase is _Phase.THINKING and self._is_spent:
            if self._forces_end:
                return list(self._end)
            bits = np.zeros_like(self._not_last)
            self.fill(bits)
            if (bits == self._mask(self._end[0])).all():
                return [self._end[0]]
        if self._inner is not None and (self._is_channel or phase is _Phase.OVER):
            return self._inner.forced()
        return []

    def error(self) -> str:
        return "" if self._inner is None else self._inner.error()

    def accept(self, token_id: int) -> None:
        phase, num_thoughts, num_written, num_inner = self._states[-1]
        begins = phase is _Phase.BEFORE and self._start[:1] == (token_id,)
        is_answer = phase is _Phase.OVER or (phase is _Phase.BEFORE and not begins)
        if self._is_channel or is_answer:
            num_inner += 1
            if self._inner is not None:
                self._inner.accept(token_id)
        self._tokens.append(token_id)
        if phase is _Phase.THINKING:
            if not self._ends(token_id):
                num_thoughts += 1
            elif self._is_spent and self._forces_end and len(self._end) > 1:
                phase, num_written = _Phase.ENDING, 1
            else:
                phase = self._ended
        elif self._is_channel and phase is _Phase.BEFORE:
            if tuple(self._tokens[-len(self._start) :]) == self._start:
                phase = _Phase.THINKING
        elif is_answer:
            phase = _Phase.OVER
        elif phase is _Phase.ENDING:
            num_written += 1
            if num_written == len(self._end):
                phase, num_written = self._ended, 0
        else:
            phase, num_written = _Phase.STARTING, num_written + 1
            if num_written == len(self._start):
                phase, num_written = _Phase.THINKING, 0
        self._states.append(_State(phase, num_thoughts, num_written, num_inner))

    def rollback(self, num_tokens: int) -> None:
        inner = self._states[-1].num_inner - self._states[-1 - num_tokens].num_inner
        if inner and self._inner is not None:
            self._inner.rollback(inner)
        del self._states[-num_tokens:], self._tokens[-num_tokens:]

    @property
    def _is_spent(self) -> bool:
        return self._budget is not None and self._states[-1].num_thoughts >= self._budget

    @property
    def _forces_end(self) -> bool:
        """Whether the whole end marker can be forced: `inner` does not see the marker."""
        return self._inner is None or not self._is_channel

    def _ends(self, token_id: int) -> bool:
        """Whether the latest token ends the thoughts."""
        if self._is_channel or self._is_spent:
            return token_id == self._end[0]
        return tuple(self._tokens[-len(self._end) :]) == self._end

    def _mask(self, *token_ids: int) -> np.ndarray:
        return pack_mask(token_ids, self._vocab_size)
