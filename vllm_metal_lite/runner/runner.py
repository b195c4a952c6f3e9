"""One step: a ForwardBatch in, sampled tokens out when read.

Layers below know no requests; layers above touch no `mx.array` of the model.

A step that fails can be launched again: its K and V go to the same slots, and all else (the
attention's state, the sampler) is still that of the previous step.  If a kernel is at fault, the
step is launched again without that kernel.  Recurrent states are an exception: they change in
place, so a step that fails may have changed some of them (`StatesLost`).
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from vllm_metal_lite.attention.base import Attention, DeviceBatch
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_DRAFT, UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import is_our_fault, one_line
from vllm_metal_lite.kernels.launch import power_of_two
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.runner.compiled import CompiledSteps, Result
from vllm_metal_lite.runner.drafter import Drafter, Wanted
from vllm_metal_lite.runner.pooling_table import pooled_sums
from vllm_metal_lite.runner.result import StepResult, count_rejected
from vllm_metal_lite.runner.step_path import StepPath, is_out_of_memory, kernel_at_fault
from vllm_metal_lite.sampling.logprobs import prompt_logprobs
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.sampling.processors import Drafts
from vllm_metal_lite.sampling.sampler import Sampler

logger = logging.getLogger(__name__)

# The tokens allowed in some sampled rows, or a function that makes them.
Masks = TokenMasks | Callable[[], TokenMasks | None]
Drafted = TypeVar("Drafted")


class StatesLost(RuntimeError):
    """A kernel failed and was replaced, but the recurrent states of the step are lost.  The step's
    requests must start again from an earlier state."""


class ModelRunner:
    """Runs packed steps of one model over one store.

    path: the current path, which changes if a kernel fails.  ranks: the processes that share the
    model; each has a runner, and all run the same steps.  drafting: the model that drafts tokens.
    """

    def __init__(
        self,
        model: PackedModel,
        path: StepPath,
        sampler: Sampler,
        ranks: RankGroup = ALONE,
        drafting: PackedModel | None = None,
    ) -> None:
        self.model, self.sampler, self.ranks = model, sampler, ranks
        self._drafting = drafting
        self.drafter: Drafter | None = None
        self._drafts: tuple[np.ndarray, mx.array] | None = None  # seats (B,), drafts (B, K)
        self._use(path)
        self.num_compiled_steps = 0
        self._last: StepResult | None = None

    def _use(self, path: StepPath) -> None:
        """Use this path from now on."""
        state = path.attention.new_state()
        compiled = CompiledSteps(self.model, path.attention, path.fusion)
        self.path, self.compiled, self._state = path, compiled, state
        if self._drafting is not None:
            vocab_size = self.model.layout.vocab_size
            self.drafter = Drafter(self._drafting, path.attention, padded_rows, vocab_size)

    @property
    def attention(self) -> Attention:
        return self.path.attention

    def execute(
        self,
        batch: ForwardBatch,
        num_prompt_logprobs: int = 0,
        masks: Masks | None = None,
        after: StepResult | None = None,
    ) -> StepResult:
        """Submit a step.

        masks: may be a function, which is called while the device runs the forward, perhaps twice.
        after: the previous step, which holds the tokens that are unknown on the host; it has no
        drafts.  Raises if this step is invalid, or if the previous step failed before the host
        waited for it.  A kernel that fails is replaced (`StepPath.fallback`).
        """
        store = self.attention.store
        batch.validate(*store.num_blocks, num_state_slots=store.states.num_slots)
        while True:
            try:
                return self._launch(batch, num_prompt_logprobs, masks, after)
            except Exception as e:
                if not self._fall_back(e, lambda: self._build_again(batch, after), after):
                    raise
                if store.states.arrays:
                    raise StatesLost("a kernel failed in a step with recurrent layers") from e
            # Launch again only here: until `except` ends, the error holds the failed step's arrays.

    def _fall_back(
        self, error: Exception, again: Callable[[], Any], after: StepResult | None = None
    ) -> bool:
        """Switch to the fallback, if a kernel is at fault; returns whether it did.

        again: builds what failed."""
        if self.ranks.size > 1:  # the others wait inside this step, and cannot repeat it
            return False
        if not self.path.uses_kernels or is_out_of_memory(error):
            return False
        if after is not None:
            after.wait()
        culprit = kernel_at_fault(again)
        if culprit is not None:
            self._use(self.path.fallback(culprit))
        return culprit is not None

    def _build_again(self, batch: ForwardBatch, after: StepResult | None) -> None:
        step = self._prepare(batch, after)
        built = self.compiled.build(step, self._state)
        if self.drafter is not None and self.drafter.follows:
            self.drafter.follow(step, built, StepResult(batch, None))

    def _prepare(self, batch: ForwardBatch, after: StepResult | None) -> DeviceBatch:
        step = self.attention.prepare(batch, padded_rows(batch.num_tokens))
        if not self.ranks.has_logits:  # evaluating any row sends the hidden states
            step = step._replace(logits_indices=mx.zeros(1, mx.int32))
        if self.drafter is not None and self.drafter.takes_hidden:
            step = step._replace(returns_hidden=True)
        if self._drafts is not None and len(batch.draft_token_ids):
            step = step._replace(token_ids=known_tokens(step, UNKNOWN_DRAFT, *self._drafts))
        if after is not None and UNKNOWN_TOKEN in batch.token_ids:
            assert after.output is not None, "the step before does not sample an unknown token"
            seats, sampled = after.batch.sampled_seats, after.output.token_ids[:, None]
            step = step._replace(token_ids=known_tokens(step, UNKNOWN_TOKEN, seats, sampled))
        return step

    def _launch(
        self,
        batch: ForwardBatch,
        num_prompt_logprobs: int,
        masks: Masks | None,
        after: StepResult | None,
    ) -> StepResult:
        """Submit a step once; a failure leaves the state before the step."""
        before = self.sampler.state
        if self.drafter is not None:
            self.drafter.forget()
        try:
            step = self._prepare(batch, after)
            built = self.compiled(step, self._state)
            if built is None:
                built = self.compiled.build(step, self._state)
            else:
                self.num_compiled_steps += 1
            result = self._sample_and_score(batch, step, built, num_prompt_logprobs, masks)
            state = built[-1]
            if self.drafter is not None and self.drafter.follows:
                state = self.drafter.follow(step, built, result)
            self._submit(result, state)
            return result
        except BaseException:
            self.sampler.state = before
            raise

    def _sample_and_score(
        self,
        batch: ForwardBatch,
        step: DeviceBatch,
        built: Result,
        num_prompt_logprobs: int,
        masks: Masks | None,
    ) -> StepResult:
        """Sample, score and pool: what the host reads of a forward."""
        logits, hidden, state = built
        if not self.ranks.has_logits:
            return StepResult(batch, None, written=[logits])
        output = scored = rejected = None
        pooled = None if batch.pooled is None else pooled_sums(batch.pooled, hidden[0])
        num_sampled = len(batch.sample_segments)
        if num_sampled and not (batch.pooled and batch.pooled.samples_nothing):
            if callable(masks):
                self._start(logits, state)
                masks = masks()
            drafts = Drafts.of(batch.draft_token_ids) if len(batch.draft_token_ids) else None
            output = self.sampler(logits[:num_sampled], batch.sampled_seats, masks, drafts)
            rejected = count_rejected(batch, step.token_ids, output.for_host)
        if len(batch.prompt_targets):
            targets = mx.array(batch.prompt_targets)
            wanted = logits[num_sampled : num_sampled + len(targets)]
            scored = prompt_logprobs(wanted, targets, num_prompt_logprobs)
        # A wait for this step must not include the next one.
        written = state[:1] if self.attention.overlaps else []
        return StepResult(batch, output, scored, pooled, written, rejected)

    def _start(self, *arrays: Any) -> None:
        """Have the device compute a step's arrays."""
        if not self.attention.overlaps:
            self.synchronize()
        self._last = None
        mx.async_eval(*arrays, self.attention.store.states.arrays)

    def _submit(self, result: StepResult, state: list[mx.array]) -> None:
        self._start(result.arrays, state)
        # After the launch: the next step must not continue from a step that never launched.
        self._last, self._state = result, state

    def draft(self, wanted: Wanted) -> mx.array | None:
        """Submit drafts behind the last step; returns them, (B, K) int32.  The next step may have
        UNKNOWN_DRAFT in their place.

        None: drafting failed, which no request must notice.  A kernel at fault is replaced;
        otherwise the drafter drafts no more.
        """
        assert self.drafter is not None, "this model has no drafter"
        draft = self.drafter.draft
        made = self._drafted(lambda: draft(wanted, self._state))
        if made is None:
            return None
        token_ids, self._state = made
        self._drafts = wanted.seats, token_ids
        return token_ids

    def catch_up(self, batch: ForwardBatch) -> None:
        """Have a draft model compute the K and V of earlier tokens (`Drafter.catch_up`).  A failure
        is handled as in `draft`."""
        assert self.drafter is not None, "this model has no drafter"
        if not self.attention.overlaps:
            self.synchronize()
        catch_up = self.drafter.catch_up
        state = self._drafted(lambda: catch_up(batch, self._state))
        if state is not None:
            self._state = state

    def _drafted(self, run: Callable[[], Drafted]) -> Drafted | None:
        """What the drafter made; None if it failed."""
        try:
            return run()
        except Exception as e:
            if self._last is not None:
                self._last.wait()  # a failure of the step is not the drafter's
            if not self._fall_back(e, run):
                why = f"{type(e).__name__}: {one_line(e)}"
                log = logger.exception if is_our_fault(e) else logger.warning
                log(f"no model drafts tokens from now on, because drafting failed: {why}")
                self.drafter = self._drafting = None
            return None

    def forget(self) -> None:
        """Drop the last step; its result will not be read."""
        self._last = None

    def synchronize(self) -> None:
        """Wait for all submitted steps."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()


def known_tokens(
    step: DeviceBatch, unknown: int, seats: np.ndarray, token_ids: mx.array
) -> mx.array:
    """The token_ids (num_rows,) int32 of a step, with tokens that only the device has in place of
    `unknown`, their value on the host.

    seats: (B,) int, all distinct.  token_ids: (B, K) int32; those of a seat go to its rows in
    order.
    """
    batch = step.batch
    rows = np.flatnonzero(batch.token_ids == unknown)
    if not len(rows):
        return step.token_ids
    if len(rows) == batch.num_tokens and np.array_equal(batch.req_indices, seats):
        newest, padding = token_ids[:, 0], step.num_rows - len(rows)
        return mx.pad(newest, (0, padding)) if padding else newest
    segments = np.searchsorted(batch.cu_seqlens_q, rows, side="right") - 1
    nth = np.arange(len(rows)) - np.searchsorted(segments, segments)  # in its segment
    place = np.zeros(seats.max() + 1, np.int32)
    place[seats] = np.arange(len(seats))
    found = token_ids[mx.array(place[batch.req_indices[segments]]), mx.array(nth)]
    return mx.put_along_axis(step.token_ids, mx.array(rows), found, axis=0)


def padded_rows(num_tokens: int) -> int:
    """The number of rows of a padded step.  Shapes must repeat: MLX reuses buffers of similar size.

    See `DeviceProfile.row_grains`.
    """
    grain = next(grain for rows, grain in profile().row_grains if num_tokens <= rows)
    return -(-num_tokens // grain) * grain if grain else power_of_two(num_tokens)
