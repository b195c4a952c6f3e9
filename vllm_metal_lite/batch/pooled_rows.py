"""What a step computes for pooling requests, in place of tokens."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The hidden states and the logits that a step reads.

    segments: (Q,) int32, the segment of each range.
    ranges: (Q, 2) int32, first packed row and end; the hidden states of these rows are summed.
    scored: (L,) int32, segments with scores; score_rows: (L,) int32, their places among the T
    sampled rows; score_token_ids: (L, K) int32, the tokens whose logits are read there.
    samples_nothing: no row of the step needs a token.
    """

    segments: np.ndarray
    ranges: np.ndarray
    scored: np.ndarray
    score_rows: np.ndarray
    score_token_ids: np.ndarray
    samples_nothing: bool
