"""Drafts by the model's drafter: behind a step in flight, or once the step's tokens are known."""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_DRAFT, ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.engine.constraints import Constraints
from vllm_metal_lite.engine.seats import Seats
from vllm_metal_lite.runner.drafter import Wanted
from vllm_metal_lite.runner.pictures import NoEyes, with_pictures
from vllm_metal_lite.runner.pipeline import StepInFlight
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.sampling.processors import Drafts
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


class ModelDrafts:
    """Makes the drafts of the next step, at most once a step.

    runner: has the drafter.
    """

    def __init__(
        self,
        runner: ModelRunner,
        inputs: InputBatch,
        seats: Seats,
        constraints: Constraints,
        eyes: NoEyes,
    ) -> None:
        self._runner, self._inputs, self._seats = runner, inputs, seats
        self._constraints, self._eyes = constraints, eyes
        self._rows: dict[Request, int] = {}  # the last row of each request that the next follows
        self._made: dict[Request, list[int]] | None = None  # None: nothing yet for the next step

    def step_begins(self) -> None:
        """Drop the drafts: a step that took them begins, or it was undone."""
        self._made = None

    def step_ended(self, step: StepInFlight[SchedulerOutput]) -> None:
        """Note the rows of a step whose tokens are known now."""
        forced = {request for request, _ in step.scheduled.forced}  # other tokens follow
        rows = zip(step.scheduled.terminal, step.result.live_rows, strict=True)
        self._rows = {request: live[-1] for request, live in rows if request not in forced}

    def forget(self) -> None:
        """Forget the last step, which was undone."""
        self._rows, self._made = {}, None

    def behind(
        self, step: StepInFlight[SchedulerOutput], requests: Sequence[Request], num_drafts: int
    ) -> None:
        """Draft behind a step in flight.  The device drafts before the host knows which tokens the
        drafts follow.

        requests: some of those that the step samples.  Nothing is done if a draft depends on the
        tokens before it.
        """
        if self._must_know(requests):
            return
        cu = step.result.batch.cu_sampled
        place = {request: i for i, request in enumerate(step.scheduled.terminal)}
        which = np.array([place[request] for request in requests], np.int32)
        rows, drawn, rejected = cu[which + 1] - 1, None, step.result.rejected
        if rejected is not None:  # the sampler does not count the tokens of such a step yet
            drawn, rejected = np.diff(cu)[which], rejected[mx.array(which)]
        self._make(requests, num_drafts, rows, drawn, rejected)

    def __call__(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """The drafts of the next step.  wanted: pairs (request, the most tokens)."""
        if self._made is None:
            requests = [request for request, _ in wanted if request in self._rows]
            rows = np.array([self._rows[request] for request in requests], np.int32)
            self._make(requests, max(most for _, most in wanted), rows)
        made = self._made or {}
        return [made.get(request, [])[:most] for request, most in wanted]

    def _must_know(self, requests: Sequence[Request]) -> bool:
        """Whether each draft depends on the tokens before it.  Otherwise they stay on the device,
        which gets the next step without a pause."""
        seats = np.array([self._seats.req_index[request] for request in requests], np.int32)
        constrained = any(request in self._constraints for request in requests)
        return constrained or self._runner.sampler.reads_drafts(seats)

    def _make(
        self,
        requests: Sequence[Request],
        num_drafts: int,
        rows: np.ndarray,
        drawn: np.ndarray | None = None,
        rejected: mx.array | None = None,
    ) -> None:
        """Make drafts of B requests, without those whose blocks have no room.

        rows, rejected: see `Wanted`.  drawn: (B,) the tokens, at most, that the sampler does not
        count yet, because the step in flight draws them; None: none.
        """
        runner, inputs, drafter = self._runner, self._inputs, self._runner.drafter
        if drafter is None or not drafter.can_draft or not requests:
            return
        seats = np.array([self._seats.req_index[request] for request in requests], np.int32)
        depth = np.zeros(len(seats), np.int32) if drawn is None else drawn.astype(np.int32)
        known = inputs.num_tokens[seats] + np.maximum(depth - 1, 0)
        room = np.minimum(inputs.num_blocks[seats] * inputs.block_size, inputs.token_ids.shape[1])
        fits = np.flatnonzero(room - known + 1 + drafter.takes_hidden >= num_drafts)
        if not len(fits):
            return
        requests, seats, depth = [requests[i] for i in fits.tolist()], seats[fits], depth[fits]
        rejected = None if rejected is None else rejected[mx.array(fits)]
        must_know = self._must_know(requests)

        def pack(positions: np.ndarray) -> ForwardBatch:
            batch = inputs.pack(seats, positions, np.ones(len(seats), np.int64))
            return with_pictures(batch, [request.pictures for request in requests], self._eyes)

        def choose(logits: mx.array, drafts: list[mx.array]) -> mx.array:
            known, masks = np.zeros((len(seats), 0), np.int32), None
            if must_know:
                if drafts:
                    known = np.stack([np.array(tokens) for tokens in drafts], axis=1)
                masks = self._constraints.masks_behind(requests, known)
            before = Drafts(depth + np.int32(len(drafts)), known, rejected)
            return runner.sampler(logits, seats, masks, before).token_ids

        tokens = runner.draft(Wanted(seats, num_drafts, rows[fits], rejected, pack, choose))
        self._made = {}
        if tokens is not None:
            made = np.array(tokens) if must_know else np.full(tokens.shape, UNKNOWN_DRAFT, np.int32)
            self._made = dict(zip(requests, made.tolist(), strict=True))
