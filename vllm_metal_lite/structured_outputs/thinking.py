"""Thoughts before an answer of a given form, or in channels of the answer, with a budget."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.sampling.masks import Constraint, pack_mask
from vllm_metal_lite.structured_params import ThinkingParams


class _Phase(Enum):
    BEFORE = auto()  # thoughts may begin, or the answer
    THINKING = auto()
    ENDING = auto()  # in a channel: thoughts are over, and the rest of the end marker is forced
    OVER = auto()  # no thoughts may begin; never in a channel


class _State(NamedTuple):
    """num_thoughts: the number of tokens of all thoughts so far.  num_written: how much of the next
    marker (`start` BEFORE, else `end`) is written.  num_inner: how much `inner` has accepted."""

    phase: _Phase
    num_thoughts: int = 0
    num_written: int = 0
    num_inner: int = 0


class Thinking:
    """A `Constraint`: limits thoughts to a budget, and holds the answer after them to `inner`.

    inner: None: the answer is free.  Thoughts may have any token but EOS.  When the budget is used
    up, the rest of the end marker is forced.
    """

    def __init__(
        self,
        params: ThinkingParams,
        inner: Constraint | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._start, self._end, self._in_channel = params.start, params.end, params.is_channel
        self._budget, self._inner, self._vocab_size = params.budget, inner, vocab_size
        self._not_last = ~pack_mask(eos_token_ids, vocab_size)
        phase = _Phase.BEFORE if self._start else _Phase.OVER
        # The state before each token; the last is the current one.
        self._states = [_State(_Phase.THINKING if params.is_open else phase)]

    def fill(self, bits: np.ndarray) -> bool:
        phase, _, num_written, _ = self._states[-1]
        if phase is _Phase.THINKING and (self._is_spent or self._inner is not None):
            bits[:] = self._mask(self._end[num_written]) if self._is_spent else self._not_last
            return True
        if self._inner is None:
            return False
        # The tokens of `start` so far may be the answer's: `inner` accepts them, and is asked then.
        limited, num_asked = self._inner.fill(bits), 0
        for token in self._start[:num_written]:
            if limited and not (bits & self._mask(token)).any():
                bits[:] = 0
                break
            self._inner.accept(token)
            limited, num_asked = self._inner.fill(bits), num_asked + 1
        if num_asked:
            self._inner.rollback(num_asked)
        if limited and phase is _Phase.BEFORE and self._budget != 0:
            bits |= self._mask(self._start[num_written])
        return limited

    def forced(self) -> list[int]:
        phase, _, num_written, _ = self._states[-1]
        if phase is _Phase.ENDING or (phase is _Phase.THINKING and self._is_spent):
            return list(self._end[num_written:])
        if phase is _Phase.OVER and self._inner is not None:
            return self._inner.forced()
        return []

    def error(self) -> str:
        return "" if self._inner is None else self._inner.error()

    def accept(self, token_id: int) -> None:
        before, (phase, num_thoughts, num_written) = self._states[-1], self._next(token_id)
        answer: Sequence[int] = ()  # tokens that are known now to be the form's
        if self._in_channel:
            answer = (token_id,)
        elif phase is _Phase.OVER and before.phase is not _Phase.THINKING:
            answer = (*self._start[: before.num_written], token_id)
        if self._inner is not None:
            for token in answer:
                self._inner.accept(token)
        num_inner = before.num_inner + len(answer)
        self._states.append(_State(phase, num_thoughts, num_written, num_inner))

    def _next(self, token_id: int) -> tuple[_Phase, int, int]:
        """Decide when thoughts begin and end: (phase, num_thoughts, num_written) after a token."""
        phase, num_thoughts, num_written, _ = self._states[-1]
        if phase is _Phase.OVER:
            return phase, num_thoughts, 0
        if phase is _Phase.THINKING:
            num_written = _num_written(self._end, num_written, token_id)
            is_whole = num_written == len(self._end)
            # In a channel the first token of the end marker ends thoughts; the others are forced.
            if not (num_written if self._in_channel else is_whole):
                return phase, num_thoughts + 1, num_written
            if self._in_channel and self._is_spent and not is_whole:
                return _Phase.ENDING, num_thoughts, num_written
            return (_Phase.BEFORE if self._in_channel else _Phase.OVER), num_thoughts, 0
        if phase is _Phase.ENDING:
            if token_id == self._end[num_written]:
                num_written = (num_written + 1) % len(self._end)
                return (phase if num_written else _Phase.BEFORE), num_thoughts, num_written
            num_written = 0  # `inner` allows no rest of the end marker
        before, num_written = num_written, _num_written(self._start, num_written, token_id)
        if not self._in_channel and num_written <= before:  # the answer has begun
            return _Phase.OVER, num_thoughts, 0
        if 0 < num_written == len(self._start):
            return _Phase.THINKING, num_thoughts, 0
        return _Phase.BEFORE, num_thoughts, num_written

    def rollback(self, num_tokens: int) -> None:
        num_left = len(self._states) - num_tokens
        inner = self._states[-1].num_inner - self._states[num_left - 1].num_inner
        if inner and self._inner is not None:
            self._inner.rollback(inner)
        del self._states[num_left:]

    @property
    def _is_spent(self) -> bool:
        return self._budget is not None and self._states[-1].num_thoughts >= self._budget

    def _mask(self, *token_ids: int) -> np.ndarray:
        return pack_mask(token_ids, self._vocab_size)


class ChannelThinking(Thinking):
    """Thoughts in channels, as Harmony has them: messages, several in an answer.

    `inner` holds for thoughts, too.  When the budget is used up, the end marker is forced, and no
    thoughts begin again: the second token of `start`, which names the channel, may not follow the
    first.  `inner` goes first: where `inner` does not allow the end, such as within a character,
    thoughts continue until `inner` allows the end.
    """

    def fill(self, bits: np.ndarray) -> bool:
        phase, _, num_written, _ = self._states[-1]
        limited = self._inner is not None and self._inner.fill(bits)
        if self._is_spent and phase in (_Phase.THINKING, _Phase.ENDING):
            wanted = self._mask(self._end[num_written])
        elif self._is_spent and num_written:
            wanted = ~self._mask(*self._start[1:2])
        else:
            return limited
        if not limited:
            bits[:] = wanted
        elif (bits & wanted).any():
            bits &= wanted
        return True

    def forced(self) -> list[int]:
        # With `inner`, the mask leaves only the end.
        return super().forced() if self._inner is None else self._inner.forced()


def _num_written(marker: Sequence[int], num_written: int, token_id: int) -> int:
    """How much of `marker` ends a text, if num_written of it did before token_id came."""
    text = (*marker[:num_written], token_id)
    return next(n for n in range(len(text), -1, -1) if text[len(text) - n :] == marker[:n])
