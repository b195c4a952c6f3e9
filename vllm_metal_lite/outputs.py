"""What the engine returns, named as vLLM names it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Logprob:
    """A token's log-probability, after a grammar's mask; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class _Text:
    """A field whose value may be a function that makes the text: reading the field calls it.

    The text of a finished answer is kept, and the function is not called again.  (A dataclass takes
    the default of a field from the class, where `__get__` returns "".)
    """

    def __get__(self, output: "CompletionOutput | None", owner: type) -> str:
        if output is None:
            return ""
        text = vars(output)["_text"]
        if isinstance(text, str):
            return text
        finished = output.finished  # read first, because another thread may end the answer
        text = text()
        if finished:
            vars(output)["_text"] = text
        return text

    def __set__(self, output: "CompletionOutput", text: str | Callable[[], str]) -> None:
        vars(output)["_text"] = text


@dataclass
class CompletionOutput:
    """One of a request's `n` answers.

    text: the text, made from the tokens when it is read, so an unread answer costs nothing.
    finish_reason: None while running, then "stop" (end of sequence, stop string or stop token),
    "length" (max_tokens or the context is reached), "abort" or "error".
    error: why the answer cannot continue, in one line; None unless finish_reason is "error".
    stop_reason: the stop string or the stop token id that ended it, None for end of sequence.
    num_shown_tokens: how many of the first tokens the text of a finished answer shows; None before
    the end, and if a stop string cut the text.
    """

    index: int
    text: _Text = _Text()
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_shown_tokens: int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the decoded text, not the detokenizer."""
        return {**self.__dict__, "_text": self.text}


@dataclass(slots=True)
class RequestOutput:
    """A request's state after a step: everything generated so far.

    num_cached_tokens: how many prompt tokens the prefix cache held at the request's admission.
    num_restored_tokens: how many of these came from the disk for this request.
    prompt_logprobs: one entry for each prompt token, None for the first.
    pooled: the values of a finished pooling request, float32: the embedding, or the
    log-probabilities of its tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    num_restored_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: np.ndarray | None = None


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one prompt.

    embedding: float32 values, as many as the model's hidden size, or as `dimensions` asks for.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    embedding: list[float]


@dataclass(slots=True)
class ScoringRequestOutput:
    """The result of `LLM.score` for one pair of texts.

    index: the number of the pair.
    score: the probability that the texts match, or the cosine of their embeddings.
    """

    index: int
    score: float
