"""Records what steps have computed.

A step can be scheduled before the previous step's tokens are known: `advance` appends
UNKNOWN_TOKEN for each, and `update` replaces it.  `rollback` undoes steps that failed.
"""

from collections.abc import Mapping, Sequence

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.scheduler.drafts import DraftScheduler
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request, RequestQueue, RequestStatus
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, TokenCounts
from vllm_metal_lite.scheduler.state_scheduler import StateScheduler
from vllm_metal_lite.scheduler.state_slots import StateSlots

_NONE: Mapping[Request, Sequence[int]] = {}


class Progress:
    """Every unfinished request, and what it holds of the store.

    waiting: requests without a seat.  decodes: requests whose next segment is one token.
    chunked: requests whose next segment is a chunk: of a prompt, or of several known tokens of an
    answer.
    suspects: while there are any, each step holds one of them, alone.  See `FailedSteps`.
    unlaunched: the step that is being scheduled, until its launch begins.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[KVGroup],
        num_state_slots: int,
        max_draft_states: int,
    ) -> None:
        states = StateSlots(num_state_slots, config.max_num_seqs) if num_state_slots else None
        caching = config.enable_prefix_caching
        self.kv = KVCacheManager(groups, config.block_size, caching, states)
        self._states = None if states is None else StateScheduler(self.kv, states, max_draft_states)
        self.drafts = DraftScheduler(self.kv, self._states)
        self.suspects: dict[Request, int] = {}
        self.unlaunched: SchedulerOutput | None = None
        self.counts = TokenCounts()
        # Each unfinished request is in one of these queues, or ended by `advance`.
        self.waiting = RequestQueue()
        self.chunked = RequestQueue()
        self.decodes = RequestQueue()
        # Decodes that complete a block whose last token is still unknown: no hash, so no name yet.
        self._unnamed: list[tuple[SchedulerOutput, Request]] = []

    @property
    def num_running(self) -> int:
        return len(self.chunked) + len(self.decodes)

    @property
    def running(self) -> list[Request]:
        """The requests that have a seat."""
        return [*self.chunked, *self.decodes]

    def finish(self, request: Request) -> None:
        """Remove a request from its queue and release its blocks, unless that is done."""
        if request.status is RequestStatus.FINISHED:
            return
        request.forget_unknown()
        if request.status is RequestStatus.RUNNING:
            if request.block_tables:  # else `advance` has released them
                self._unseat(request)
        else:
            self.waiting.discard(request)
        request.status = RequestStatus.FINISHED
        self.suspects.pop(request, None)

    def advance(
        self, output: SchedulerOutput, forced: Mapping[Request, Sequence[int]] = _NONE
    ) -> list[Request]:
        """Record a step in flight, so that the next one can be scheduled.

        Its tokens stay unknown until `update`; only one step may have unknown tokens.  Returns the
        requests that reach max_length with this step.  They release their seats and blocks; the
        next step may reuse the blocks, since the device runs steps in order.

        forced: the next tokens of requests that are known before the step samples the first.
        """
        num_decodes, running = output.num_decodes, RequestStatus.RUNNING
        if self._states is not None:
            self._states.name_checkpoints(output)
        terminal = [s.request for s in output.segments[:num_decodes]]
        for request in terminal:
            if request.status is running:
                request.num_computed_tokens += 1
        for segment in output.segments[num_decodes:]:
            request, end = segment.request, segment.known_end
            is_terminal = end == request.num_tokens
            if is_terminal:
                terminal.append(request)
            if request.status is running:
                request.num_computed_tokens = end
                self.kv.give_back(request, end)  # with short windows, most of its blocks
                continues = is_terminal and request.num_tokens + 1 < request.max_length
                if continues and self.chunked.discard(request):
                    self.decodes.add(request)
        ended = []
        for request in terminal:
            if request.status is running:
                if request in forced:
                    self._append_forced(request, forced[request], output)
                else:
                    request.token_ids.append(UNKNOWN_TOKEN)
                if len(request.token_ids) == request.max_length:
                    ended.append(request)
        for request in ended:
            self._unseat(request)
        output.terminal = terminal
        return ended

    def _append_forced(
        self, request: Request, token_ids: Sequence[int], output: SchedulerOutput
    ) -> None:
        """Append known tokens.  If there are several, the next step computes them as a chunk."""
        known = list(token_ids[: request.max_length - request.num_tokens])
        request.token_ids += known
        output.forced.append((request, known))
        if len(known) > 1:
            self.decodes.discard(request)
            self.chunked.add(request)

    def update(
        self,
        output: SchedulerOutput,
        token_ids: Sequence[int],
        accepted: Mapping[Request, Sequence[int]],
    ) -> None:
        """Record the tokens of a step, after `advance`.

        token_ids: ints, one for each request of `output.terminal`; UNKNOWN_TOKEN: none, and the
        request must end.  The token of a request finished since `schedule` is ignored.
        accepted: for each request with drafts, its tokens behind the first.
        """
        finished = RequestStatus.FINISHED
        for request, token in zip(output.terminal, token_ids, strict=True):
            if request.status is not finished and request.token_ids[-1] == UNKNOWN_TOKEN:
                request.token_ids[-1] = token
        for segment in output.segments:
            request = segment.request
            if not segment.draft_token_ids or request.status is finished:
                continue
            if not self.drafts.accept(segment, output, accepted[request]):
                self.decodes.discard(request)
                self.chunked.add(request)
        for ahead, request in self._unnamed:
            is_known = request.token_ids[-1] != UNKNOWN_TOKEN
            if is_known and request.status is RequestStatus.RUNNING:
                end = request.num_tokens
                ahead.named += self.kv.name_blocks(request, end - 1, end)
        self._unnamed.clear()
        self.counts.add(output.counts)

    def rollback(self, *outputs: SchedulerOutput) -> None:
        """Undo all steps in flight, given in order, after one failed.  Their requests wait, as if
        preempted.  Blocks that they completed lose their names: they may be unwritten."""
        self._unnamed.clear()
        for output in reversed(outputs):
            self.kv.unname(output.named)
            if self.kv.states is not None:
                self.kv.states.unname(output.named_states)
            for segment in output.segments:
                if segment.request.status is RequestStatus.RUNNING:
                    segment.request.num_computed_tokens = segment.num_computed
            for request in output.admitted:
                request.num_computed_tokens = 0
        for segment in (s for output in outputs for s in output.segments):
            segment.request.forget_unknown()
            if segment.request.status is RequestStatus.RUNNING:
                self._requeue(segment.request)

    def _requeue(self, request: Request) -> None:
        """Release seat and blocks, and queue the request to recompute all its tokens."""
        self._unseat(request)
        before = max(request.num_computed_before, request.num_computed_tokens)
        request.num_computed_before, request.num_computed_tokens = before, 0
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def _unseat(self, request: Request) -> None:
        if not self.decodes.discard(request):
            self.chunked.discard(request)
        if self._states is not None:
            self._states.free(request)
        self.kv.free(request)
