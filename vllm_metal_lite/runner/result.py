"""A submitted step: tokens on the device, copied to the host when read."""

import threading
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from vllm_metal_lite.attention.base import Step
from vllm_metal_lite.attention.padding import pad_rows
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import NO_DRAFT, UNKNOWN_TOKEN
from vllm_metal_lite.runner.pooled import Pooled
from vllm_metal_lite.sampling.logprobs import Logprobs


class StepResult:
    """A submitted step; reading a value waits for the step to end.

    token_ids: (T,) int32, one per sampled row.  logprobs, prompt_logprobs: None unless requested.
    no_token: row -> `no_token.MASKED` or NAN, for rows without a token; their token_ids are 0.
    draft_token_ids: see ForwardBatch.
    for_host: the tokens that the host reads; the next step reads `sampled`.
    written: arrays that exist once the step has written to the store.
    arrays: the arrays to wait for: the values, or `written` if the step has none.  If both are
    empty, `wait` waits for all submitted work.  done: whether `wait` has returned.

    Any thread may read a step that samples or scores.  Only the submitting thread may wait for
    other steps.
    """

    def __init__(
        self,
        req_indices: np.ndarray,
        sampled: mx.array | None,
        logprobs: Logprobs[mx.array] | None,
        prompt_logprobs: Logprobs[mx.array] | None,
        for_host: mx.array | None = None,
        written: Sequence[mx.array] = (),
        draft_token_ids: np.ndarray | None = None,
        pooled: Pooled | None = None,
    ) -> None:
        self._req_indices, self._sampled = req_indices, sampled
        self._drafts = [] if draft_token_ids is None else draft_token_ids.tolist()
        self._logprobs, self._prompt_logprobs, self._pooled = logprobs, prompt_logprobs, pooled
        self.arrays = [] if sampled is None else [sampled if for_host is None else for_host]
        self.arrays += [*(logprobs or ()), *(prompt_logprobs or ()), *(pooled or ())]
        self.arrays = self.arrays or list(written)
        self.done = False
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
            self.done = True

    @cached_property
    def token_ids(self) -> np.ndarray:
        return np.maximum(self._reported, 0)

    @cached_property
    def live_rows(self) -> list[range]:
        """The rows of each terminal segment whose tokens count: the first, and each further row
        while the token before it is the draft that the row was computed from."""
        if not self._drafts:
            return [range(row, row + 1) for row in range(len(self._req_indices))]
        rows, first, tokens = [], 0, self._reported.tolist()
        while first < len(tokens):
            last = first
            while self._drafts[last] != NO_DRAFT and tokens[last] == self._drafts[last]:
                last += 1
            rows.append(range(first, last + 1))
            first = self._drafts.index(NO_DRAFT, last) + 1
        return rows

    @cached_property
    def no_token(self) -> dict[int, int]:
        reported = self._reported
        return {row: int(reported[row]) for row in np.flatnonzero(reported < 0).tolist()}

    @cached_property
    def _reported(self) -> np.ndarray:
        self.wait()
        if self._sampled is None:  # without rows, or of a stage that samples nothing
            return np.zeros(len(self._req_indices), np.int32)
        return np.array(self.arrays[0])

    @cached_property
    def logprobs(self) -> Logprobs[np.ndarray] | None:
        self.wait()
        return _to_host(self._logprobs)

    @cached_property
    def prompt_logprobs(self) -> Logprobs[np.ndarray] | None:
        self.wait()
        return _to_host(self._prompt_logprobs)

    @cached_property
    def pooled(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The values of `Pooled`, on the host; None if the step pools nothing."""
        self.wait()
        if self._pooled is None:
            return None
        return np.array(self._pooled.sums), np.array(self._pooled.logits)

    def complete(self, step: Step) -> mx.array:
        """(num_rows,) int32: the next step's token_ids; this step's tokens, still on the device,
        replace UNKNOWN_TOKEN."""
        batch, num_rows = step.batch, step.num_rows
        unknown = np.flatnonzero(batch.token_ids == UNKNOWN_TOKEN)  # leading rows, one per segment
        if not len(unknown):
            return step.token_ids
        seats, sampled = batch.req_indices[unknown], self._sampled
        assert sampled is not None, "a token is unknown that this step does not sample"
        if len(unknown) == batch.num_tokens and np.array_equal(seats, self._req_indices):
            behind = num_rows - len(unknown)
            return mx.pad(sampled, (0, behind)) if behind else sampled
        place = np.zeros(self._req_indices.max() + 1, np.int32)
        place[self._req_indices] = np.arange(len(self._req_indices))
        if len(unknown) == batch.num_tokens:
            return sampled[mx.array(pad_rows(place[seats], num_rows))]
        index = np.arange(num_rows, dtype=np.int32) + len(self._req_indices)
        index[unknown] = place[seats]
        return mx.concatenate([sampled, step.token_ids])[mx.array(index)]


def _to_host(arrays: Logprobs[mx.array] | None) -> Logprobs[np.ndarray] | None:
    if arrays is None:
        return None
    return Logprobs(*map(np.array, arrays))
