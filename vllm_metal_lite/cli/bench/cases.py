"""The cases that `bench` measures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import RequestError

SETTLE_STEPS = 8  # decode steps after the last first token that are not counted


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
