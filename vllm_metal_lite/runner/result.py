"""A submitted step: tokens on the device, copied to the host when read."""

import threading
import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.sampling.logprobs import Logprobs
from vllm_metal_lite.sampling.sampler import SamplerOutput


class StepResult:
    """A submitted step; reading a value waits for the step to end.

    output: what the sampler returned; None if the step samples nothing.
    token_ids: (T,) int32, one per sampled row.  no_token: row -> `no_token.MASKED` or NAN, for rows
    without a token; their token_ids are 0.
    rejected: (terminal segments,) int32, see `count_rejected`; None for a step without drafts.
    logprobs, prompt_logprobs: None if nobody asked.
    pooled: (Q, hidden_size) float32, the sums of PooledRows; None if the step pools nothing.
    written: arrays that exist once the step has written to the store.
    arrays: those that `wait` waits for: the values, or `written` if the step has none.  If both are
    empty, `wait` waits for all submitted work.
    done: whether `wait` has returned.  ended_at: when it returned, by `time.monotonic`.

    Any thread may read a step that samples or scores.  Only the submitting thread may wait for
    other steps.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        output: SamplerOutput | None,
        prompt_logprobs: Logprobs[mx.array] | None = None,
        pooled: mx.array | None = None,
        written: Sequence[mx.array] = (),
        rejected: mx.array | None = None,
    ) -> None:
        self.batch, self.output, self.rejected = batch, output, rejected
        self._prompt_logprobs, self._pooled = prompt_logprobs, pooled
        self.arrays = [] if output is None else [output.for_host, *(output.logprobs or ())]
        self.arrays += [] if rejected is None else [rejected]
        self.arrays += [*(prompt_logprobs or ()), *(() if pooled is None else (pooled,))]
        self.arrays = self.arrays or list(written)
        self.done, self.ended_at = False, 0.0
        # MLX does not allow two threads to wait for one array at the same time.
        self._waiting = threading.Lock()

    def wait(self) -> None:
        """Wait for the step to end; raise its error if it failed."""
        with self._waiting:
            if self.done:
                return
            if self.arrays:
                mx.eval(self.arrays)
            else:
                mx.synchronize()
            self.done, self.ended_at = True, time.monotonic()

    @cached_property
    def token_ids(self) -> np.ndarray:
        return np.maximum(self._reported, 0)

    @cached_property
    def live_rows(self) -> list[range]:
        """The sampled rows of each terminal segment whose tokens belong to the answer: the first
        one, and those behind accepted drafts."""
        if self.rejected is None:
            return [range(row, row + 1) for row in range(len(self.batch.sample_segments))]
        self.wait()
        cu = self.batch.cu_sampled
        return list(map(range, cu[:-1].tolist(), (cu[1:] - np.array(self.rejected)).tolist()))

    @cached_property
    def no_token(self) -> dict[int, int]:
        reported = self._reported
        return {row: int(reported[row]) for row in np.flatnonzero(reported < 0).tolist()}

    @cached_property
    def _reported(self) -> np.ndarray:
        self.wait()
        if self.output is None:  # without rows, or of a stage that samples nothing
            return np.zeros(len(self.batch.sample_segments), np.int32)
        return np.array(self.output.for_host)

    @cached_property
    def logprobs(self) -> Logprobs[np.ndarray] | None:
        self.wait()
        return None if self.output is None else _to_host(self.output.logprobs)

    @cached_property
    def prompt_logprobs(self) -> Logprobs[np.ndarray] | None:
        self.wait()
        return _to_host(self._prompt_logprobs)

    @cached_property
    def pooled(self) -> np.ndarray | None:
        self.wait()
        return None if self._pooled is None else np.array(self._pooled)


def count_rejected(batch: ForwardBatch, token_ids: mx.array, sampled: mx.array) -> mx.array | None:
    """(terminal segments,) int32, how many drafts of each are wrong, or behind a wrong one; None
    for a step without drafts.

    A draft is right if the row before it sampled this very token.  token_ids: (num_rows,), the
    step's.  sampled: (T,) int32, negative for a row without a token.
    """
    if not len(batch.draft_token_ids):
        return None
    first, counts = batch.cu_sampled[:-1], np.diff(batch.cu_sampled) - 1
    at = np.arange(counts.max(), dtype=np.int32)
    is_draft = at < counts[:, None]
    rows = np.where(is_draft, first[:, None] + at, 0)
    drafts = token_ids[mx.array(np.where(is_draft, batch.logits_indices[rows] + 1, 0))]
    is_right = mx.array(is_draft) & (drafts == sampled[mx.array(rows)])
    accepted = mx.cumprod(is_right.astype(mx.int32), axis=1).sum(axis=1)
    return mx.array(counts.astype(np.int32)) - accepted


def _to_host(arrays: Logprobs[mx.array] | None) -> Logprobs[np.ndarray] | None:
    if arrays is None:
        return None
    return Logprobs(*map(np.array, arrays))
