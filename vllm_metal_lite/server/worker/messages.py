"""The messages between the server and an engine's process, over a pipe.

A message is a call: the name of a method of the other side, and its arguments.  `Worker` and
`EngineClient` list these methods.  The exception is the first message to the process, the engine's
EngineConfig.  Every time is in seconds of `time.monotonic`, which all processes of a machine share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.engine.pooling import ONE_TOKEN
from vllm_metal_lite.outputs import Logprob
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.sampling_params import SamplingParams

# Names of the values that `EngineClient.replied` gets while the engine starts.  FILES: the folder
# with the model's files, and the size of the weight files in bytes.  FACTS: ModelFacts, once the
# engine is ready.
FILES, FACTS = "files", "facts"


class EngineLost(RuntimeError):
    """A step failed or the engine's process ended; the request has no further tokens."""

    code = "engine_lost"


@dataclass(frozen=True, slots=True)
class Add:
    """A request for the engine.  fair_round: within a priority, see `fair_rounds.py`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    fair_round: int = 0
    checkpoints: tuple[int, ...] = ()
    cache_salt: str | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters.  A pooling request samples one token, which is dropped."""
        return ONE_TOKEN if isinstance(self.params, PoolingParams) else self.params


class PositionLogprobs(NamedTuple):
    """The log-probabilities of a position, without texts: lists are pickled fast."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]


def to_wire(position: dict[int, Logprob]) -> PositionLogprobs:
    entries = position.values()
    return PositionLogprobs(list(position), [e.logprob for e in entries], [e.rank for e in entries])


def from_wire(scores: PositionLogprobs, text_of: Callable[[int], str]) -> dict[int, Logprob]:
    """text_of: the text of a token."""
    entries = zip(*scores, strict=True)
    return {token: Logprob(value, rank, text_of(token)) for token, value, rank in entries}


class AnswerUpdate(NamedTuple):
    """The new part of an answer.

    text: new text of a request with stop strings; None for others, whose text the server makes from
    the tokens.
    num_shown_tokens: number of a finished answer's tokens that its text shows; None: see `text`.
    logprobs: one entry for each of token_ids, if asked for.
    Only the request's first update has the rest.  scheduled_at: when its first step was launched.
    prompt_logprobs: all of them.  pooled: a pooling request's result.
    """

    answer_index: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_shown_tokens: int | None = None
    error: str | None = None
    logprobs: list[PositionLogprobs] | None = None
    scheduled_at: float | None = None
    num_cached_tokens: int | None = None
    num_restored_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    pooled: np.ndarray | None = None
