"""A budget of thoughts that are messages in a channel, as Harmony has them."""

from typing import NamedTuple

import numpy as np

from vllm_metal_lite.sampling.constraint import Constraint
from vllm_metal_lite.sampling.masks import pack_mask
from vllm_metal_lite.structured_params import ThinkingParams


class _State(NamedTuple):
    """num_thoughts: tokens of all thoughts so far.  num_ending: tokens of `end` that were forced
    behind the thoughts."""

    is_thinking: bool
    num_thoughts: int = 0
    num_ending: int = 0


class ThoughtChannel:
    """A `Constraint`: `inner`, which holds for thoughts too, and a budget of all thoughts.

    When the budget is used up, thoughts end by forced tokens, and none begin again: the second
    token of `start`, which tells the channel of thoughts from others, may not follow the first.
    inner: of the whole answer; None: no limit.  Where it allows no end, as within a character,
    thoughts continue up to the next token where it does.
    """

    def __init__(self, params: ThinkingParams, inner: Constraint | None, vocab_size: int) -> None:
        self._start, self._end = tuple(params.start), tuple(params.end)
        self._budget, self._inner = params.budget, inner
        self._ends = [pack_mask([token], vocab_size) for token in self._end]
        self._no_start = ~pack_mask(self._start[1:2], vocab_size)
        # Before each token, and now.
        self._states = [_State(params.is_open)]
        self._tokens: list[int] = []

    def fill(self, bits: np.ndarray) -> bool:
        state = self._states[-1]
        if state.num_ending:
            bits[:] = self._ends[state.num_ending]
            return True
        limited = self._inner is not None and self._inner.fill(bits)
        if not self._is_spent:
            return limited
        if state.is_thinking:
            if limited and not (bits & self._ends[0]).any():
                return True
            bits[:] = self._ends[0]
            return True
        if self._start[:1] == tuple(self._tokens[-1:]):
            bits[:] = bits & self._no_start if limited else self._no_start
            return True
        return limited

    def forced(self) -> list[int]:
        state = self._states[-1]
        if state.num_ending or (state.is_thinking and self._is_spent and self._inner is None):
            return list(self._end[state.num_ending :])
        if state.is_thinking and self._is_spent:
            bits = np.zeros_like(self._ends[0])
            self.fill(bits)
            if (bits == self._ends[0]).all():
                return [self._end[0]]
        return self._inner.forced() if self._inner is not None else []

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        self._tokens.append(token_id)
        self._states.append(self._after(token_id))

    def rollback(self, num_tokens: int) -> None:
        if self._inner is not None:
            self._inner.rollback(num_tokens)
        del self._states[-num_tokens:], self._tokens[-num_tokens:]

    @property
    def _is_spent(self) -> bool:
        return self._budget is not None and self._states[-1].num_thoughts >= self._budget

    def _after(self, token_id: int) -> _State:
        is_thinking, count, num_ending = self._states[-1]
        if num_ending:
            return _State(False, count, (num_ending + 1) % len(self._end))
        if not is_thinking:
            begins = tuple(self._tokens[-len(self._start) :]) == self._start
            return _State(begins, count)
        if token_id != self._end[0]:
            return _State(True, count + 1)
        # `inner` says what follows the end.
        is_forced = self._is_spent and self._inner is None and len(self._end) > 1
        return _State(False, count, int(is_forced))
