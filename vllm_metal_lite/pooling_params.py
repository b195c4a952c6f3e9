"""What one pooling request reads from its prompt, named as vLLM names it."""

from dataclasses import dataclass

from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.rules import apply_rules, choice, integer, switch, token_ids

POOLING_RULES = {
    "pooling": choice("last", "mean", optional=True),
    "normalize": switch(),
    "dimensions": integer(1, optional=True),
    "truncate_prompt_tokens": integer(
        -1, allowed="a positive integer, or -1 for the context length", zero=False, optional=True
    ),
    "score_token_ids": token_ids(empty=False),
}


@dataclass(frozen=True)
class PoolingParams:
    """Validated when made, `RequestError` if out of range.

    pooling: the hidden state of the "last" token, or the "mean" over all; None: as the model's
    folder says, else "last".
    normalize: scale the embedding to length 1.
    dimensions: keep this number of leading values, and normalise those; None: all.
    truncate_prompt_tokens: cut longer prompts to this length; None: refuse those that do not
    fit.
    score_token_ids: read the log-probabilities of these tokens behind the prompt, in place of an
    embedding.
    """

    pooling: str | None = None
    normalize: bool = True
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    score_token_ids: list[int] | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        apply_rules(self, POOLING_RULES, RequestError)
