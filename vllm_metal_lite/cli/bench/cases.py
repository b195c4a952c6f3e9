"""The cases that `bench` measures."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import RequestError

SETTLE_STEPS = 8  # decode steps after the last first token that are not counted


class BenchCase(NamedTuple):
    """`requests` prompts of `context` tokens each that arrive together.

    max_tokens: new tokens after which a request may end.
    """

    requests: int
    context: int
    max_tokens: int


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

    def max_tokens(count: int, context: int) -> int:
        """Enough for all requests to decode `new_tokens` together, although the first request
        decodes alone while the other prompts are computed."""
        a_step = max(config.max_num_batched_tokens - count, 1)
        a_chunk = min(config.long_prefill_token_threshold or context, context)
        waiting = math.ceil(count * context / a_step) + math.ceil(context / a_chunk)
        return new_tokens + SETTLE_STEPS + waiting + count

    longest = max_tokens(max(requests), max(contexts))
    room = max_model_len - longest
    if room < 1:
        raise RequestError(
            f"--new-tokens {new_tokens} needs {longest} tokens beside a prompt: more than the "
            f"context of {max_model_len} tokens holds"
        )
    pairs = {(count, min(context, room)) for count in requests for context in contexts}
    cases = [BenchCase(*pair, max_tokens(*pair)) for pair in pairs]
    return sorted(cases, key=lambda case: (case.requests * case.context, case.requests))
