"""Log-probabilities of a prompt, gathered over the chunks that it is computed in."""

from typing import Any

import numpy as np

from vllm_metal_lite.runner.result import Logprobs


class PromptLogprobs:
    """Rows 0 to n - 2: what the model thought of prompt tokens 1 to n - 1; k most likely each."""

    def __init__(self, num_prompt_tokens: int, k: int) -> None:
        self.k = k
        rows = num_prompt_tokens - 1
        self.token_ids = np.zeros((rows, 1 + k), np.int32)
        self.logprobs = np.zeros((rows, 1 + k), np.float32)
        self.ranks = np.zeros(rows, np.int32)

    def put(self, positions: np.ndarray, scored: Logprobs, rows: np.ndarray) -> None:
        """Take `rows` of a step's results, for the tokens that follow `positions`."""
        width = self.token_ids.shape[1]
        self.token_ids[positions] = scored.token_ids[rows, :width]
        self.logprobs[positions] = scored.logprobs[rows, :width]
        self.ranks[positions] = scored.ranks[rows]

    def take(self) -> Any:
        """As tensors, which vLLM takes to its front end; nothing is kept here."""
        import torch
        from vllm.v1.outputs import LogprobsTensors

        def tensor(array: np.ndarray) -> Any:
            # torch gives an empty array (a prompt of one token) strides of 0, and vLLM cannot send
            # a tensor with those.
            made = torch.from_numpy(array)
            return made if made.numel() else torch.empty(array.shape, dtype=made.dtype)

        arrays = self.token_ids, self.logprobs, self.ranks
        del self.token_ids, self.logprobs, self.ranks
        return LogprobsTensors(*map(tensor, arrays))
