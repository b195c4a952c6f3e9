"""Drafts by the model's drafter: ahead, behind a step in flight, or once its tokens are known."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

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

# A draft model catches up when a request lacks this many tokens, or all requests together lack as
# many as it computes at once: one call for many tokens costs less.
_MOST_MISSING, _MOST_ROWS = 32, 256


class ModelDrafts:
    """Makes the drafts of the next step, at most once: by `draft_ahead`, or else by `draft`.
    Also has a draft model catch up.

    runner: has the drafter.  most_rows: the most rows of a step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        inputs: InputBatch,
        seats: Seats,
        constraints: Constraints,
        eyes: NoEyes,
        most_rows: int,
    ) -> None:
        self._runner, self._inputs, self._seats = runner, inputs, seats
        self._most_rows = min(most_rows, _MOST_ROWS)
        self._constraints, self._eyes = constraints, eyes
        # The sampled row of each request in the last step whose token is the request's newest.
        self._rows: dict[Request, int] = {}
        # The drafts of the next step; UNKNOWN_DRAFT: on the device alone.  None: not made yet.
        self._made: dict[Request, list[int]] | None = None
        # For each request, the position of the first token that lacks the draft model's K and V.
        self._missing = WeakKeyDictionary[Request, int]()

    def step_begins(self) -> None:
        """Drop the drafts: the step that begins has taken them, or has none."""
        self._made = None

    def step_ended(self, step: StepInFlight[SchedulerOutput]) -> None:
        """Note the rows of a step whose tokens are known now."""
        if self._runner.drafter is None:
            return
        forced = {request for request, _ in step.scheduled.forced}  # other tokens follow
        rows = zip(step.scheduled.terminal, step.result.live_rows, strict=True)
        self._rows = {request: live[-1] for request, live in rows if request not in forced}

    def forget(self) -> None:
        """Forget the last step, which was undone."""
        self._rows, self._made = {}, None

    def catch_up(self, output: SchedulerOutput) -> None:
        """Have a draft model compute K and V of the tokens that it left out, if it follows this
        step or lacks many.  Tokens whose blocks a window has released stay without, and so do the
        first ones if requests with many come together.
        """
        drafter = self._runner.drafter
        if drafter is None or drafter.takes_hidden:
            return
        ends = {segment.request: segment.num_computed for segment in output.segments}
        firsts = {r: max(self._missing.pop(r, end), self._first_held(r)) for r, end in ends.items()}
        rows = {r: end - firsts[r] for r, end in ends.items() if firsts[r] < end}
        total, longest = sum(rows.values()), max(rows.values(), default=0)
        is_full = longest >= _MOST_MISSING or total + len(rows) > self._most_rows
        if rows and (drafter.follows or is_full):
            if total > self._most_rows:  # the last ones of each
                most = self._most_rows // len(rows)
                rows = {request: min(count, most) for request, count in rows.items()}
            late = sorted(rows, key=lambda r: rows[r])  # segments of one row come first
            counts = np.array([rows[request] for request in late])
            starts = np.array([ends[request] for request in late]) - counts
            self._runner.catch_up(self._pack(late, starts, counts))
            firsts = ends
        if not drafter.follows:
            self._missing.update(firsts)

    def _pack(
        self, requests: Sequence[Request], num_computed: np.ndarray, num_scheduled: np.ndarray
    ) -> ForwardBatch:
        """A batch for the drafter alone; see `InputBatch.pack`."""
        batch = self._inputs.pack(self._seats.indices(requests), num_computed, num_scheduled)
        return with_pictures(batch, [request.pictures for request in requests], self._eyes)

    def _first_held(self, request: Request) -> int:
        """The first position whose blocks the request holds in all KV groups."""
        return self._inputs.block_size * max(t.num_given_back for t in request.block_tables)

    def draft_ahead(
        self, step: StepInFlight[SchedulerOutput], requests: Sequence[Request], num_drafts: int
    ) -> None:
        """Have the device draft behind a step in flight, before the host knows which tokens the
        drafts continue.

        requests: some of those that the step samples.  Nothing is done if the host must know the
        tokens first.
        """
        if self._must_know(requests):
            return
        cu, rejected = step.result.batch.cu_sampled, step.result.rejected
        place = {request: i for i, request in enumerate(step.scheduled.terminal)}
        which = np.array([place[request] for request in requests], np.int32)
        uncounted = np.zeros_like(which)
        if rejected is not None:  # after a step with drafts, the sampler counts when they are known
            uncounted, rejected = np.diff(cu)[which], rejected[mx.array(which)]
        self._make(requests, num_drafts, cu[which + 1] - 1, uncounted, rejected)

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """The drafts of the next step.  wanted: pairs (request, the most tokens)."""
        if self._made is None:
            requests = [request for request, _ in wanted if request in self._rows]
            rows = np.array([self._rows[request] for request in requests], np.int32)
            self._make(requests, max(most for _, most in wanted), rows, np.zeros_like(rows))
        made = self._made or {}
        return [made.get(request, [])[:most] for request, most in wanted]

    def _must_know(self, requests: Sequence[Request]) -> bool:
        """Whether the host must know the tokens before a draft: a grammar or an option reads them.
        Otherwise drafts stay on the device, which gets the next step without a pause."""
        seats = self._seats.indices(requests)
        constrained = any(request in self._constraints for request in requests)
        return constrained or self._runner.sampler.reads_drafts(seats)

    def _make(
        self,
        requests: Sequence[Request],
        num_drafts: int,
        rows: np.ndarray,
        uncounted: np.ndarray,
        rejected: mx.array | None = None,
    ) -> None:
        """Make drafts of B requests, without those whose blocks have no room.

        rows, rejected: see `Wanted`.  uncounted: (B,) int, the tokens before the drafts that the
        sampler does not count yet, with the rejected ones.
        """
        runner, inputs, drafter = self._runner, self._inputs, self._runner.drafter
        if drafter is None or not drafter.can_draft or not requests:
            return
        seats = self._seats.indices(requests)
        last = drafter.last_positions(rows, num_drafts)
        room = np.minimum(inputs.num_blocks[seats] * inputs.block_size, inputs.token_ids.shape[1])
        fits = np.flatnonzero(last < room)
        if not len(fits):
            return
        requests, seats, last = [requests[i] for i in fits.tolist()], seats[fits], last[fits]
        depth = uncounted[fits].astype(np.int32)
        rejected = None if rejected is None else rejected[mx.array(fits)]
        must_know = self._must_know(requests)

        def pack() -> ForwardBatch:
            return self._pack(requests, last, np.ones(len(requests), np.int64))

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
