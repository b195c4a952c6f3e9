"""One step: a ForwardBatch in, sampled tokens out, when they are asked for.

Nothing below knows about requests; nothing above touches an `mx.array` of the model.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.attention.plan import power_of_two
from vllm_metal_lite.attention.step import Attention, StepMetadata, pad_rows
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.compiled import CompiledSteps
from vllm_metal_lite.constraints import TokenMasks
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.sampling import LogprobArrays, Sampler, prompt_logprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """On the host: token_ids, logprobs (rows, 1 + k), column 0 the chosen token; ranks (rows,)."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


class StepResult:
    """A step that was submitted: reading its values waits for its end.

    token_ids: (T,) int32, one a terminal segment; the log-probabilities asked for, or None.
    undrawn: the reason (`undrawn.MASKED` or NAN) by row, for rows that give no token; their
    token_ids are 0.
    for_host: what the host reads instead of `sampled`, which the next step reads.
    arrays: the arrays to wait for; if there are none (the step only writes to the store), waiting
    is for everything that was submitted.
    """

    def __init__(
        self,
        req_indices: np.ndarray,
        sampled: mx.array | None,
        logprobs: LogprobArrays | None,
        prompt_logprobs: LogprobArrays | None,
        for_host: mx.array | None = None,
    ) -> None:
        self._req_indices, self._sampled = req_indices, sampled
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        self.arrays = [] if sampled is None else [sampled if for_host is None else for_host]
        for a in (logprobs, prompt_logprobs):
            self.arrays += [] if a is None else [a.token_ids, a.logprobs, a.ranks]
        self._done = False

    def wait(self) -> None:
        """Return when the step has run; raise the error if it failed."""
        if self._done:
            return
        if self.arrays:
            mx.eval(self.arrays)
        else:
            mx.synchronize()
        self._done = True

    @cached_property
    def token_ids(self) -> np.ndarray:
        return np.maximum(self._reported, 0)

    @cached_property
    def undrawn(self) -> dict[int, int]:
        reported = self._reported
        return {row: int(reported[row]) for row in np.flatnonzero(reported < 0).tolist()}

    @cached_property
    def _reported(self) -> np.ndarray:
        self.wait()
        return np.zeros(0, np.int32) if self._sampled is None else np.array(self.arrays[0])

    @cached_property
    def logprobs(self) -> Logprobs | None:
        self.wait()
        return _to_host(self._logprobs)

    @cached_property
    def prompt_logprobs(self) -> Logprobs | None:
        self.wait()
        return _to_host(self._prompt_logprobs)

    def complete(self, step: StepMetadata) -> mx.array:
        """(num_rows,) int32: the next step's token_ids, where those that are unknown on the host
        are this step's, on the device."""
        batch, num_rows = step.batch, step.num_rows
        unknown = np.flatnonzero(batch.token_ids == UNKNOWN_TOKEN)  # leading rows, one a segment
        seats = batch.req_indices[unknown]
        if len(unknown) == batch.num_tokens and np.array_equal(seats, self._req_indices):
            behind = num_rows - len(unknown)
            return mx.pad(self._sampled, (0, behind)) if behind else self._sampled
        if not len(unknown):
            return step.token_ids
        place = np.zeros(self._req_indices.max() + 1, np.int32)
        place[self._req_indices] = np.arange(len(self._req_indices))
        if len(unknown) == batch.num_tokens:
            return self._sampled[mx.array(pad_rows(place[seats], num_rows))]
        index = np.arange(num_rows, dtype=np.int32) + len(self._req_indices)
        index[unknown] = place[seats]
        return mx.concatenate([self._sampled, step.token_ids])[mx.array(index)]


class ModelRunner:
    """Runs packed steps of one model over one store."""

    def __init__(self, model: PackedModel, attention: Attention, sampler: Sampler) -> None:
        self.model, self.attention, self.sampler = model, attention, sampler
        self.compiled = CompiledSteps(model, attention)
        mx.eval(attention.state)  # lazy arrays belong to the thread that made them
        self._last: StepResult | None = None

    def execute(
        self,
        batch: ForwardBatch,
        req_indices: np.ndarray,
        num_prompt_logprobs: int = 0,
        grammar: TokenMasks | None = None,
        after: StepResult | None = None,
    ) -> StepResult:
        """Submit a step; req_indices (T,): the table rows of the terminal segments.

        grammar: which tokens some of these T may be.  after: the previous step, which holds the
        tokens that the host does not know yet.  Raises if this step is invalid, or if the previous
        one failed and nobody waited for it.
        """
        batch.validate(*self.attention.store.num_blocks)
        step = self.attention.prepare(batch, bucket(batch.num_tokens))
        if after is not None:
            step.token_ids = after.complete(step)
        num_sampled = len(batch.sample_segments)
        logits = self._forward(step)

        sampled = for_host = logprobs = scored = None
        if num_sampled:
            output = self.sampler(logits[:num_sampled], req_indices, grammar)
            sampled, logprobs, for_host = output.token_ids, output.logprobs, output.for_host
        if len(batch.prompt_targets):
            targets = mx.array(batch.prompt_targets)
            rows = logits[num_sampled : num_sampled + len(targets)]
            scored = prompt_logprobs(rows, targets, num_prompt_logprobs)
        result = StepResult(req_indices, sampled, logprobs, scored, for_host)
        self._submit(result)
        return result

    def _submit(self, result: StepResult) -> None:
        last, self._last = self._last, None
        if last is not None and not self.attention.overlaps:
            last.wait()
        state = [*self.attention.state, *self.attention.store.states.arrays]
        if not result.arrays and self.attention.overlaps:
            # Nothing is sampled, and the next step may run when this one is waited for.
            result.arrays = state[:1]
        mx.async_eval(result.arrays, state)
        self._last = result

    def forget(self) -> None:
        """Drop the steps under way: nobody will read their results."""
        self._last = None

    def synchronize(self) -> None:
        """Wait for the end of the steps that were submitted."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def _forward(self, step: StepMetadata) -> mx.array:
        """Logits of the batch's `logits_indices`, in order; perhaps more behind them."""
        logits = self.compiled(step)
        if logits is None:
            logits = self.model(step, self.attention, step.logits_indices)
        return logits


def bucket(num_tokens: int) -> int:
    """Rows a step is padded to, so that shapes repeat: MLX reuses buffers only of like size.

    On a CPU a padded row costs as much as a real one and buffers cost nothing: no padding.
    """
    if backend.is_cpu():
        return num_tokens
    if num_tokens <= 64:
        return power_of_two(num_tokens)
    grain = 64 if num_tokens <= 512 else 256
    return -(-num_tokens // grain) * grain


def _to_host(arrays: LogprobArrays | None) -> Logprobs | None:
    if arrays is None:
        return None
    return Logprobs(*(np.array(a) for a in (arrays.token_ids, arrays.logprobs, arrays.ranks)))
