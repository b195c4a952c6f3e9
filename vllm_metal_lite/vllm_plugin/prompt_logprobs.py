"""Prompt log-probabilities, collected over the chunks of a prompt."""

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_metal_lite.sampling.logprobs import Logprobs


class PromptLogprobs:
    """n - 1 rows; row i scores prompt token i + 1 and the k most likely tokens there."""

    def __init__(self, num_prompt_tokens: int, k: int) -> None:
        self.k = k
        rows = num_prompt_tokens - 1
        self.token_ids = np.zeros((rows, 1 + k), np.int32)
        self.logprobs = np.zeros((rows, 1 + k), np.float32)
        self.ranks = np.zeros(rows, np.int32)

    def put(self, positions: np.ndarray, scored: Logprobs[np.ndarray], rows: np.ndarray) -> None:
        """Store `rows` of a step's results: scores of the tokens after `positions`."""
        width = self.token_ids.shape[1]
        self.token_ids[positions] = scored.token_ids[rows, :width]
        self.logprobs[positions] = scored.logprobs[rows, :width]
        self.ranks[positions] = scored.ranks[rows]

    def take(self) -> LogprobsTensors:
        """Return the arrays as the tensors that vLLM sends to its front end; keeps nothing."""
        arrays = self.token_ids, self.logprobs, self.ranks
        del self.token_ids, self.logprobs, self.ranks
        return LogprobsTensors(*map(_tensor, arrays))


def _tensor(array: np.ndarray) -> torch.Tensor:
    # From an empty array (a prompt of one token) torch makes strides of 0, which vLLM cannot send.
    made = torch.from_numpy(array)
    return made if made.numel() else torch.empty(array.shape, dtype=made.dtype)
