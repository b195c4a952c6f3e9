"""What the server and an engine's process say to each other, over a pipe.

Every time is in seconds of `time.monotonic`, which all processes of a machine share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.engine.pooling import ONE_TOKEN
from vllm_metal_lite.model.pooling_config import PoolingConfig
from vllm_metal_lite.outputs import Logprob
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.sampling_params import SamplingParams

# From the server


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request.  The engine's process answers Accepted or Lost.

    fair_round: within a priority, see `fair_rounds.py`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    fair_round: int = 0
    checkpoints: tuple[int, ...] = ()
    cache_salt: str | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of its tokens; a prompt that is only read draws one, which is not used."""
        return ONE_TOKEN if isinstance(self.params, PoolingParams) else self.params


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request; unknown ids are ignored.  A request that runs ends with an update."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Compile:
    """Make and keep the grammar of a request that is about to come.  The answer is Accepted."""

    request_id: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Watch:
    """Send WatcherEvent from time to time, for this time; a later Watch extends it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process after the current step."""


# From the engine's process


@dataclass(frozen=True, slots=True)
class Log:
    """A record of the package's log.  transient: a line of progress, not for log files."""

    level: int
    message: str
    transient: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The engine is ready: what the server knows of its model.

    has_states: the model has recurrent layers, so checkpoints are of use.
    num_blocks: of the first KV group.  description: lines for the user.
    """

    name: str
    model_type: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, Any]
    has_states: bool
    caches_prefixes: bool
    block_size: int
    num_blocks: int
    max_num_seqs: int
    attention: str
    attention_reason: str
    weight_bytes: int
    store_bytes: int
    description: tuple[str, ...]
    pooling: PoolingConfig = field(default_factory=PoolingConfig)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model's files are in a folder here.  The process waits for an EngineConfig.

    weight_bytes: size of the weight files.
    """

    path: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not start: the parts of a MetalLiteError."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request is queued, or its grammar is made."""

    request_id: str


class PositionLogprobs(NamedTuple):
    """The log-probabilities of a position, without texts: lists are pickled fast."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]


def to_wire(position: dict[int, Logprob]) -> PositionLogprobs:
    entries = position.values()
    return PositionLogprobs(list(position), [e.logprob for e in entries], [e.rank for e in entries])


def from_wire(scores: PositionLogprobs, texts: Mapping[int, str]) -> dict[int, Logprob]:
    """texts: of each token."""
    entries = zip(*scores, strict=True)
    return {token: Logprob(value, rank, texts[token]) for token, value, rank in entries}


class AnswerUpdate(NamedTuple):
    """What is new in an answer.  A step's message has these by request id: a plain dict of lists.

    text: new text of a request with stop strings; None for others, whose text the server makes from
    the tokens.
    num_shown_tokens: number of a finished answer's tokens that its text shows; None: see `text`.
    logprobs: one entry for each of token_ids, if asked for.
    Only the request's first update has the rest.  scheduled_at: when its first step was launched.
    prompt_logprobs: all of them.  pooled: of a pooling request.
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


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """LLMEngine.metrics(), from time to time."""

    values: dict[str, int]


@dataclass(frozen=True, slots=True)
class Lost:
    """Requests that an error has ended, such as a step that failed.  message: one line.

    is_refused: the requests can never be served.
    """

    message: str
    request_ids: list[str]
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class WatcherEvent:
    """What the engine did, for its watchers (`watch.py`): JSON."""

    text: str
