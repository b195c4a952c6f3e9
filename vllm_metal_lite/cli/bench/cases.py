"""The cases that `bench` measures, and estimates of their time."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import RequestError

SETTLE_STEPS = 8  # decode steps after the last first token that are not counted
_FEWEST_NEW_TOKENS = 16  # a slow machine decodes at least this many of those asked for
_DECODE_SHARE = 1 / 10  # the most of the time limit that the decodes of one run get


@dataclass(frozen=True)
class BenchCase:
    """`requests` prompts of `context` tokens each that arrive together."""

    requests: int
    context: int

    @property
    def prompt_tokens(self) -> int:
        return self.requests * self.context

    def max_tokens(self, new_tokens: int, config: EngineConfig) -> int:
        """New tokens after which a request may end.

        The first request decodes while the other prompts are computed, and must not end before
        all requests have decoded `new_tokens` together.
        """
        a_step = max(config.max_num_batched_tokens - self.requests, 1)
        a_chunk = min(config.long_prefill_token_threshold or self.context, self.context)
        waiting = math.ceil(self.prompt_tokens / a_step) + math.ceil(self.context / a_chunk)
        return new_tokens + SETTLE_STEPS + waiting + self.requests


def make_cases(
    requests: Sequence[int],
    contexts: Sequence[int],
    new_tokens: int,
    max_model_len: int,
    config: EngineConfig,
) -> list[BenchCase]:
    """Every pair of a number of requests and a context, the fewest prompt tokens first.

    A context that leaves no room for new tokens below max_model_len is cut.  Raises RequestError if
    no token of a prompt fits.
    """
    longest = BenchCase(max(requests), max(contexts)).max_tokens(new_tokens, config)
    room = max_model_len - longest
    if room < 1:
        raise RequestError(
            f"the context of {max_model_len} tokens cannot hold a prompt and {longest} new tokens"
        )
    cases = {BenchCase(n, min(context, room)) for n in requests for context in contexts}
    return sorted(cases, key=lambda case: (case.prompt_tokens, case.requests))


class Pace:
    """Estimates of one engine's speed, from earlier runs.  Times are in seconds."""

    def __init__(self) -> None:
        self._prompt_rates: dict[int, float] = {}  # by context
        self._steps: dict[int, float] = {}  # time of a decode step, by number of requests

    def learn(self, case: BenchCase, prompt_rate: float, decode_rate: float | None) -> None:
        """Take the rates of a run, in tokens a second."""
        self._prompt_rates[case.context] = prompt_rate
        if decode_rate:
            self._steps[case.requests] = case.requests / decode_rate

    def step(self, requests: int) -> float:
        """Time of a decode step; at worst it grows with the number of requests.  0: unknown."""
        if not self._steps:
            return 0.0
        nearest = _nearest(self._steps, requests)
        return self._steps[nearest] * max(requests / nearest, 1.0)

    def run(self, case: BenchCase, new_tokens: int) -> float:
        """Time of a run."""
        decodes = (SETTLE_STEPS + new_tokens) * self.step(case.requests)
        if not self._prompt_rates:
            return decodes
        nearest = _nearest(self._prompt_rates, case.context)
        return case.prompt_tokens / self._prompt_rates[nearest] + decodes


def _nearest(known: Collection[int], wanted: int) -> int:
    """The largest number that is not above the wanted one; the smallest if all are."""
    return max((n for n in known if n <= wanted), default=min(known))


def affordable_new_tokens(wanted: int, step_seconds: float, limit_seconds: float) -> int:
    """New tokens that a run counts: as many as wanted, or fewer where steps are slow."""
    if not step_seconds:
        return wanted
    affordable = int(limit_seconds * _DECODE_SHARE / step_seconds)
    return min(wanted, max(affordable, _FEWEST_NEW_TOKENS))
