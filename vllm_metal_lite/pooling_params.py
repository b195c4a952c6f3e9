"""What one pooling request reads from its prompt, under vLLM's names."""

from dataclasses import dataclass
from typing import Annotated

from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.rules import apply_rules, choice, integer, switch, token_ids


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of one pooling request; `RequestError` if a value is out of range.

    pooling: the hidden state of the "last" token, or the "mean" over all; None: as the model's
    folder says, else "last".
    normalize: scale the embedding to length 1.
    dimensions: keep this number of leading values, and normalise those; None: all.
    truncate_prompt_tokens: cut longer prompts to this length; None: refuse those that do not
    fit.
    score_token_ids: read the log-probabilities of these tokens after the prompt, instead of an
    embedding.
    """

    pooling: Annotated[str | None, choice("last", "mean")] = None
    normalize: Annotated[bool, switch()] = True
    dimensions: Annotated[int | None, integer(1)] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        integer(-1, allowed="a positive integer, or -1 for the context length", zero=False),
    ] = None
    score_token_ids: Annotated[list[int] | tuple[int, ...] | None, token_ids(empty=False)] = None

    def __post_init__(self) -> None:
        apply_rules(self, RequestError)
