"""One step: a ForwardBatch in, sampled tokens out, when they are asked for.

Nothing below knows about requests; nothing above touches an `mx.array` of the model.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vllm_metal_lite import backend, submit
from vllm_metal_lite.attention.plan import power_of_two
from vllm_metal_lite.attention.step import Attention, StepMetadata, pad_rows
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.compiled import CompiledSteps
from vllm_metal_lite.constraints import TokenMasks
from vllm_metal_lite.kv.state import StateRows
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.sampling import LogprobArrays, Sampler, prompt_logprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """On the host: token_ids, logprobs (rows, 1 + k), column 0 the chosen token; ranks (rows,)."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


class StepResult:
    """A step that was submitted: reading what it gives waits for its end.

    token_ids: (T,) int32, one a terminal segment; the log-probabilities asked for, or None.
    undrawn: the reason (`undrawn.MASKED` or NAN) by row, for rows that give no token; their
    token_ids are 0.
    for_host: what the host reads instead of `sampled`, which the next step reads.
    arrays: what to wait for; if there is nothing (all is in the store), for all that was submitted.
    submission: the step's way through the thread, if it goes that way.
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
        self.submission: submit.Submission | None = None
        self.state: Any = None  # see ModelRunner
        self._done = False

    @property
    def failed(self) -> bool:
        """Whether somebody has been told that it was not launched."""
        return self.submission is not None and self.submission.reported

    def wait(self) -> None:
        """Until the step has run; raises what went wrong."""
        if self._done:
            return
        if self.submission is not None:
            self.submission.wait()
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
        self.submitter = submit.choose(attention.overlaps)
        sampler.building = self.submitter.building
        mx.eval(attention.state)  # steps may be submitted by another thread
        self._last: StepResult | None = None
        self._launched = self._state()  # as the last step left it that is known to be launched

    def execute(
        self,
        batch: ForwardBatch,
        req_indices: np.ndarray,
        num_prompt_logprobs: int = 0,
        grammar: TokenMasks | None = None,
        after: StepResult | None = None,
    ) -> StepResult:
        """Submit a step; req_indices (T,): the table rows of the terminal segments.

        grammar: what some of these T may say.  after: the step before, which gives this one the
        tokens that are not known on the host.  Raises what went wrong with this step, or with the
        one before it if nobody waited for that.
        """
        batch.validate(*self.attention.store.num_blocks)
        if self._last is not None and self._last.failed:
            self.forget()
        with self.submitter.building():
            return self._execute(batch, req_indices, num_prompt_logprobs, grammar, after)

    def _execute(
        self,
        batch: ForwardBatch,
        req_indices: np.ndarray,
        num_prompt_logprobs: int,
        grammar: TokenMasks | None,
        after: StepResult | None,
    ) -> StepResult:
        step = self.attention.prepare(batch, bucket(batch.num_tokens))
        if after is not None:
            step.token_ids = after.complete(step)
        num_sampled = len(batch.sample_segments)
        logits = self._forward(step)

        sampled = for_host = logprobs = scored = None
        if num_sampled:
            output = self.sampler(logits[:num_sampled], req_indices, grammar)
            sampled, logprobs, for_host = output.token_ids, output.logprobs, output.for_host
            if self.submitter.threaded:
                [sampled] = submit.alone([sampled])
        if len(batch.prompt_targets):
            targets = mx.array(batch.prompt_targets)
            rows = logits[num_sampled : num_sampled + len(targets)]
            scored = prompt_logprobs(rows, targets, num_prompt_logprobs)
        result = StepResult(req_indices, sampled, logprobs, scored, for_host)
        self._submit(result, step, logits)
        return result

    def _submit(self, result: StepResult, *made: Any) -> None:
        last, self._last = self._last, None
        if last is not None and not self.attention.overlaps:
            last.wait()
        attention = self.attention
        if self.submitter.threaded:
            attention.state = submit.alone(attention.state)
        result.state = self._state()
        state = [*attention.state, *attention.store.states.arrays]
        # Nothing is sampled, and the next step may be under way when this one is waited for.
        if not result.arrays and (attention.overlaps or self.submitter.threaded):
            result.arrays = submit.alone(state[:1])
        result.submission = self.submitter.submit([result.arrays, state], result, made)
        self._last = result
        if last is not None and last.submission is not None:
            last.submission.report()  # which has ended
            self._launched = last.state

    def _state(self) -> tuple[list[mx.array], list[StateRows]] | None:
        """What the next step goes on with, to come back to it when that is not launched."""
        if not self.submitter.threaded:
            return None
        with self.submitter.building():
            return submit.alone(self.attention.state), self.attention.store.states.groups

    def forget(self) -> None:
        """The steps under way were taken back: nobody wants to hear of them.

        If the last was not launched, the next one must not go on with what it left.
        """
        last, self._last = self._last, None
        if last is not None and last.submission is not None and not last.submission.succeeds():
            self.attention.state, self.attention.store.states.groups = self._launched
            self._launched = self._state()

    def synchronize(self) -> None:
        """Wait for the end of the steps that were submitted."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def _forward(self, step: StepMetadata) -> mx.array:
        """Logits of the batch's `logits_indices`, in order; perhaps more behind them."""
        with nullcontext() if self.compiled.has(step) else self.submitter.idle():
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
