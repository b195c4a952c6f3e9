"""The drafts of a step, as its sampled rows see them.

A request with k drafts has 1 + k rows that follow one another.  Row i is sampled as if the first i
drafts were the request's tokens.
"""

from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import NO_DRAFT

NO_DRAFTS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Drafts:
    """depth: (T,) uint64, the number of drafts before each row.  token_ids: (T,) int32, the draft
    after each row, or NO_DRAFT."""

    depth: np.ndarray
    token_ids: np.ndarray

    @classmethod
    def of(cls, token_ids: np.ndarray) -> "Drafts":
        """token_ids: see ForwardBatch.draft_token_ids."""
        rows = np.arange(len(token_ids))
        starts = np.append(True, token_ids[:-1] == NO_DRAFT)
        return cls((rows - np.maximum.accumulate(rows * starts)).astype(np.uint64), token_ids)

    def before(self, rows: np.ndarray) -> tuple[mx.array, mx.array]:
        """(index into `rows`, token) of each draft before each of these rows."""
        tokens, _ = self.matrix(rows)
        index, at = np.nonzero(tokens != NO_DRAFT)
        return mx.array(index.astype(np.int32)), mx.array(tokens[index, at])

    def matrix(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The drafts before each of these rows, (R, K) int32 padded behind, and their number
        (R, 1)."""
        depth = self.depth[rows].astype(np.int32)
        width = np.arange(max(int(depth.max()), 1))
        at = np.minimum((rows - depth)[:, None] + width, len(self.token_ids) - 1)
        tokens = np.where(width < depth[:, None], self.token_ids[at], NO_DRAFT)
        return tokens.astype(np.int32), depth[:, None]
