"""The messages between the server and an engine's process, over a pipe.

A message is a call: the name of a method of the other side, and its arguments.  `Worker` and
`EngineClient` list these methods.  Only the first message to the process is no call: it is the
engine's EngineConfig.  Every time is in seconds of `time.monotonic`, which all processes of a
machine share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_metal_lite.chat_formats.events import Event
from vllm_metal_lite.engine.pooling import ONE_TOKEN
from vllm_metal_lite.images.eyes import SENT_BYTES, ByBytes
from vllm_metal_lite.images.family import Prepared
from vllm_metal_lite.outputs import Logprob
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.sampling_params import SamplingParams

# Names of the values that `EngineClient.replied` gets while the engine starts.  FILES names the
# folder of the model and the size of its weight files in bytes.  FACTS names the ModelFacts,
# which come once the engine is ready.
FILES, FACTS = "files", "facts"
_MANY = 256  # deltas that are kept apart; a delta of one token takes as much memory as ten tokens


class EngineLost(RuntimeError):
    """A step failed or the engine's process ended; the request has no further tokens."""

    code = "engine_lost"


@dataclass(frozen=True, slots=True)
class Add:
    """A request for the engine.

    fair_round: the order of requests of one priority, see `fair_rounds.py`.
    checkpoints, pictures: see `conversations.Rendered`.  `Sent` packs pictures for the pipe.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    fair_round: int = 0
    checkpoints: tuple[int, ...] = ()
    cache_salt: str | None = None
    pictures: Sequence[Any] = ()

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters.  A pooling request samples one token, which is dropped."""
        return ONE_TOKEN if isinstance(self.params, PoolingParams) else self.params


class Sent:
    """The pictures that the engine's process keeps, because each turn of a conversation brings them
    again: 3 MB for 1024 x 1024 pixels.

    The server and the process have one each, and use them in the order of the messages.  So both
    keep the same pictures, and the server knows which ones it need not send.
    """

    def __init__(self) -> None:
        self._kept = ByBytes[Prepared](SENT_BYTES)

    def packed(self, pictures: Sequence[Prepared]) -> list[Prepared | bytes]:
        """What the server sends: each picture, or the digest of one that the process has."""
        sent: list[Prepared | bytes] = []
        for picture in pictures:
            is_there = self._kept.get(picture.digest) is not None
            sent.append(picture.digest if is_there else picture)
            self._kept.put(picture.digest, picture, picture.patches.nbytes)
        return sent

    def unpacked(self, sent: Sequence[Prepared | bytes]) -> list[Prepared]:
        """The pictures that the server's message means."""
        pictures = []
        for item in sent:
            picture = self._kept.get(item) if isinstance(item, bytes) else item
            assert picture is not None, "the server and the engine keep different pictures"
            self._kept.put(picture.digest, picture, picture.patches.nbytes)
            pictures.append(picture)
        return pictures


# The log-probabilities of a position: (token id, log-probability, rank) of the sampled token, then
# of the most likely ones.  Tuples are pickled fast.
Position = list[tuple[int, float, int]]


def to_wire(position: dict[int, Logprob]) -> Position:
    return [(token, entry.logprob, entry.rank or 0) for token, entry in position.items()]


class Delta(NamedTuple):
    """The new part of an answer.

    The engine's process sends the first fields.  The server adds `events` and
    `num_reasoning_tokens`, and replaces some others, when a reader takes the delta.

    choice: the number of the answer in its request; for a reader, in the reply.
    text: the new text.  None over the pipe, unless the engine searches for stop strings: the server
    makes the text from the tokens.
    finish_reason: as in CompletionOutput.  A reader also gets "tool_calls", and None for an answer
    that fails.
    num_shown_tokens: how many tokens of a finished answer its text shows; None: see `text`.
    logprobs: one entry for each of token_ids, if the request asks for them.
    events: the parsed text; text that may become a marker is held back.
    num_reasoning_tokens: all new tokens if any of them belongs to thoughts, else 0.
    """

    choice: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_shown_tokens: int | None = None
    error: str | None = None
    logprobs: list[Position] | None = None
    events: Sequence[Event] = ()
    num_reasoning_tokens: int = 0


def add_delta(deltas: list[Delta], delta: Delta) -> None:
    """Add a delta to earlier ones of its answer.  Now and then they become one, to save memory."""
    deltas.append(delta)
    if len(deltas) > _MANY:
        deltas[:] = [joined(deltas)]


def joined(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of an answer as one."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return last
    has_scores = first.logprobs is not None
    return last._replace(
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        text=None if first.text is None else "".join(delta.text or "" for delta in deltas),
        logprobs=[p for delta in deltas for p in delta.logprobs or ()] if has_scores else None,
        events=[event for delta in deltas for event in delta.events],
        num_reasoning_tokens=sum(delta.num_reasoning_tokens for delta in deltas),
    )
