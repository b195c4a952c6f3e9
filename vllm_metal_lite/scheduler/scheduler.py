"""Decides which tokens the next step computes.  docs/scheduling.md explains the rules.

A step closes part of the gaps of requests (request.py):
1. decodes (requests whose prompt is computed) get one token each, or several that are known;
2. partial prefills resume;
3. waiting requests are admitted.
Each phase takes requests in the order of (priority, fair_round, arrival), up to
`max_num_batched_tokens` and `max_num_seqs`.

A step can be scheduled before the previous step's tokens are known: `advance` appends
UNKNOWN_TOKEN for each, and `update` replaces it.

Where all tokens are known, a decode may be lengthened by drafts (drafts.py): rows of tokens that
the request will probably have.  They take only what the step leaves over.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import le, sub

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.config import MAX_CHUNK_TIMES_CONTEXT, EngineConfig
from vllm_metal_lite.scheduler.drafts import DraftScheduler, Propose
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager, NewBlocks, PrefixHit
from vllm_metal_lite.scheduler.limits import check_spans, longest
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.request_queue import SORT_KEY, RequestQueue
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment, TokenCounts
from vllm_metal_lite.scheduler.state_scheduler import StateScheduler
from vllm_metal_lite.scheduler.state_slots import StateSlots
from vllm_metal_lite.scheduler.step_limit import StepLimit

# Requests that admission may skip in a step: they wait for a leader, for the disk, or for tokens.
_MAX_PASSED = 64
# Steps in which prompts may take the tokens that an earlier request's span needs.  Then no later
# request is admitted before it.
_PATIENCE = 8


class Scheduler:
    """Holds every unfinished request and the blocks of the store.

    groups: the store's KV groups.  max_model_len: longest context, in tokens.  num_state_slots: of
    recurrent states; 0 if the model keeps none.  shares_in_step: a request may start behind blocks
    that another one computes in the same step.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[KVGroup],
        max_model_len: int,
        num_state_slots: int = 0,
        shares_in_step: bool = True,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.shares_in_step = shares_in_step
        states = StateSlots(num_state_slots, config.max_num_seqs) if num_state_slots else None
        caching = config.enable_prefix_caching
        self.kv = KVCacheManager(groups, config.block_size, caching, states)
        self._states = None if states is None else StateScheduler(self.kv, states)
        self.drafts = DraftScheduler(self.kv, self._states)
        # Whether a request waits until its prefix is read.  The prefix disk sets this function.
        self.must_wait: Callable[[Request, PrefixHit], bool] = lambda request, hit: False
        # Follows the times of steps, if the engine sets it.
        self.limit: StepLimit | None = None
        # While there are suspects, each step holds one of them, alone.  See FailedSteps.
        self.suspects: dict[Request, int] = {}
        self.num_preemptions = 0
        self.counts = TokenCounts()
        # Each unfinished request is in one of these queues, or ended by `advance`.
        self.waiting = RequestQueue()
        self.partials = RequestQueue()
        self.decodes = RequestQueue()
        # Decodes that complete a block whose last token is still unknown: no hash, so no name yet.
        self._unnamed: list[tuple[SchedulerOutput, Request]] = []
        self._num_added = 0
        self._prefilled_last = False
        # The most steps in a row in which a span did not fit beside decodes and other prompts.
        self._passed_over = 0

    @property
    def num_running(self) -> int:
        return len(self.partials) + len(self.decodes)

    @property
    def running(self) -> list[Request]:
        """The requests that have a seat."""
        return [*self.partials, *self.decodes]

    # Add and remove requests

    def add(self, request: Request) -> None:
        """Queue a request.  Raises RequestError, changing nothing, if it could never finish."""
        request.max_length = longest(request, self.max_model_len, self.kv)
        if request.spans:
            check_spans(request, self.config, self._max_num_new_tokens)
        # The count orders requests of equal arrival (the n answers of one prompt).
        request.sort_key = (request.priority, request.fair_round, request.arrival, self._num_added)
        self._num_added += 1
        self.waiting.add(request)

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

    # Steps

    def schedule(self, propose: Propose | None = None) -> SchedulerOutput:
        """Decide the next step.  It is empty only if every request ends with the step in flight,
        or must wait.

        propose: makes the drafts of decodes; None: the step has none.
        """
        out = self.schedule_alone(self.suspects)
        phases, policy = [self._schedule_decodes, self._schedule_prefills], self._policy
        # Under the other policies a step holds one kind, if this kind has something to compute.
        is_mixed = policy == "mixed"
        if not is_mixed and (not self._prefilled_last or (policy == "whole" and self._prompts)):
            phases.reverse()
        if out.is_empty:
            phases[0](out)
            if is_mixed or out.is_empty:
                phases[1](out)
        if out.is_empty and self.partials:
            self._break_deadlock(out)
        self._prefilled_last = any(s.is_prompt for s in out.segments[out.num_decodes :])
        if propose is not None:
            scored = sum(s.num_scheduled for s in out.segments if s.request.max_chunk)
            rows = self.config.max_logits_rows - len(out.segments) - scored
            longest = max((s.num_computed for s in out.segments[: out.num_decodes]), default=0)
            budget = min(self._tokens_left(out), self._rows_left(out, longest), rows)
            self.drafts.add(out, propose, budget, self.num_running)
        # InputBatch.pack wants segments of one token first, prompts' one-token chunks included.
        prefills = out.segments[out.num_decodes :]
        if len(prefills) > 1:
            prefills.sort(key=lambda s: s.num_scheduled > 1)
            out.segments[out.num_decodes :] = prefills
        return out

    def schedule_alone(self, requests: Iterable[Request]) -> SchedulerOutput:
        """A step of the first of these suspects that can run now.  Empty if none can: then others
        must run first, since they hold the blocks."""
        out = SchedulerOutput()
        if self.kv.states is not None:
            self.kv.states.begin_step()
        for request in requests:
            if request.status is RequestStatus.WAITING:
                self._admit(out, [request], starting=True)
            elif request in self.decodes:
                self._decode(out, [request])
            else:
                self._resume(out, [request])
            if out.segments or out.preempted:
                break
        return out

    def may_preempt(self) -> bool:
        """Whether the decodes need more blocks than are available.  If so, wait for the unknown
        tokens before scheduling: requests that end with them release blocks."""
        if self.kv.num_available >= len(self.decodes):
            return False
        block_size = self.kv.block_size
        needy = [r for r in self.decodes if r.num_computed_tokens == r.num_blocks * block_size]
        for request in needy:
            self.kv.give_back(request, request.num_computed_tokens)
        return len(needy) > self.kv.num_available

    def advance(self, output: SchedulerOutput) -> list[Request]:
        """Record a step in flight, so that the next one can be scheduled.

        Its tokens stay unknown until `update`; only one step may have unknown tokens.  Returns the
        requests that reach max_length with this step.  They release their seats and blocks; the
        next step may reuse the blocks, since the device runs steps in order.
        """
        num_decodes, running = output.num_decodes, RequestStatus.RUNNING
        if self._states is not None:
            self._states.name_checkpoints(output)
        if not self.shares_in_step:
            for segment in output.segments:
                if segment.request.status is running:
                    start, end = segment.num_computed, segment.known_end
                    output.named += self.kv.name_blocks(segment.request, start, end)
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
                if not segment.draft_token_ids:  # these may be computed again, from the start
                    self.kv.give_back(request, end)  # with short windows, most of its blocks
                continues = is_terminal and request.num_tokens + 1 < request.max_length
                if continues and self.partials.discard(request):
                    self.decodes.add(request)
        ended = []
        for request in terminal:
            if request.status is running:
                if request.forced_token_ids:
                    self._append_forced(request, output)
                else:
                    request.token_ids.append(UNKNOWN_TOKEN)
                if len(request.token_ids) == request.max_length:
                    ended.append(request)
        for request in ended:
            self._unseat(request)
        output.terminal = terminal
        return ended

    def _append_forced(self, request: Request, output: SchedulerOutput) -> None:
        """Append known tokens.  If there are several, the next step computes them as a chunk."""
        forced = list(request.forced_token_ids[: request.max_length - request.num_tokens])
        request.forced_token_ids = ()
        request.token_ids += forced
        output.forced.append((request, forced))
        if len(forced) > 1:
            self.decodes.discard(request)
            self.partials.add(request)

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
                self.partials.add(request)
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
            segment.request.forced_token_ids = ()
            if segment.request.status is RequestStatus.RUNNING:
                self._requeue(segment.request)

    # The three phases

    def _schedule_decodes(self, out: SchedulerOutput) -> None:
        self._decode(out, self.decodes)
        self._resume(out, [r for r in self.partials if not r.is_prompt(r.num_computed_tokens)])

    def _decode(self, out: SchedulerOutput, decodes: Iterable[Request]) -> None:
        budget, block_size = self.config.max_num_batched_tokens, self.kv.block_size
        states, state = self._states, None
        # Preemption removes only the last request of this list, so the iteration stays valid.
        for request in decodes:
            if len(out.segments) == budget:
                break
            start = request.num_computed_tokens
            new_blocks: NewBlocks | None = ()
            if start == request.num_blocks * block_size:
                while (new_blocks := self.kv.allocate(request, start, start + 1)) is None:
                    if self._preempt_lowest(out) is request:
                        break
            if new_blocks is None:
                break
            if states is not None:
                state = states.decode(request, start, out)
            out.segments.append(Segment(request, start, 1, new_blocks, state))
            if (start + 1) % block_size == 0 and self.shares_in_step:
                if request.token_ids[-1] == UNKNOWN_TOKEN:
                    self._unnamed.append((out, request))
                else:
                    out.named += self.kv.name_blocks(request, start, start + 1)
        out.num_decodes = out.total_num_scheduled_tokens = len(out.segments)

    def _schedule_prefills(self, out: SchedulerOutput) -> None:
        prompts, self._passed_over = self._prompts, 0
        self._resume(out, prompts)
        # A preempted request is admitted first, and there are no blocks for it now.
        if not out.preempted:
            self._admit(out, self.waiting, starting=not prompts)

    @property
    def _policy(self) -> str:
        """What the next step may hold, see docs/scheduling.md.  Decodes leave a span too few tokens
        only as long as other prompts use these."""
        is_overdue = self._passed_over >= (_PATIENCE if self._prefilled_last else 1)
        policy = self.config.prefill_policy
        return "alternate" if policy == "mixed" and is_overdue else policy

    @property
    def _prompts(self) -> list[Request]:
        return [r for r in self.partials if r.is_prompt(r.num_computed_tokens)]

    def _resume(self, out: SchedulerOutput, partials: Iterable[Request]) -> None:
        for request in partials:
            start, room = request.num_computed_tokens, self.kv.room(request)
            num_new_tokens = self._chunk(request, start, out)
            num_new_tokens = request.last_end(start + min(num_new_tokens, room)) - start
            # 0: no budget or no blocks.  The request waits for decodes to end.  So does the queue:
            # a prompt needs a block of its own to be admitted.
            if num_new_tokens > 0:
                out.segments.append(self._schedule_chunk(request, num_new_tokens, out))

    def _admit(self, out: SchedulerOutput, waiting: Sequence[Request], starting: bool) -> None:
        """Give seats to requests of the queue, in order.

        Admission needs blocks for the known tokens of this and all running requests, plus one block
        each; with fewer, a preemption would soon follow.  (With nothing running, it always fits.)
        A request that does not fit blocks the queue, unless only its span needs more tokens than
        the step has left.
        """
        if not waiting or not self._has_room(out):
            return
        # A loop over all running requests: most steps return before it.
        left, at, states = self.spare_blocks(), 0, self._states
        while at < min(len(waiting), _MAX_PASSED + 1):
            if min(left) <= 0 or not self._has_room(out):
                break
            request = waiting[at]
            hit = self.kv.find_prefix(request)
            start = hit.num_tokens
            if self.must_wait(request, hit) or (
                states is not None and states.follows(request, start, out, self.partials)
            ):
                at += 1
                continue
            num_new_tokens = self._chunk(request, start, out)
            if num_new_tokens <= 0 < request.num_passed_over < _PATIENCE:
                at += 1
                continue
            cost = self.kv.cost(request, hit, self._max_num_new_tokens(request, start))
            if num_new_tokens <= 0 or not all(map(le, cost, left)):
                break
            # Decodes wait for the turn to end, so admit only prompts that finish in this step.
            must_finish = self.config.prefill_policy == "whole" and not starting
            if must_finish and num_new_tokens < request.num_tokens - start:
                break
            self._seat(request, hit, num_new_tokens, out)
            left = list(map(sub, left, cost))

    def _seat(
        self, request: Request, hit: PrefixHit, num_new_tokens: int, out: SchedulerOutput
    ) -> None:
        """Seat a request behind its cached prefix, and schedule its first chunk."""
        self.waiting.discard(request)
        self.partials.add(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit.num_tokens
        if not request.num_computed_before:
            request.num_cached_tokens = min(hit.num_tokens, request.num_prompt_tokens)
            if self.kv.reads_cache(request):
                out.counts.add_hit(request, hit)
        self.kv.admit(request, hit)
        if self._states is not None:
            self._states.admit(request, hit)
        out.admitted.append(request)
        start = request.num_computed_tokens
        end = request.last_end(start + min(num_new_tokens, self.kv.room(request)))
        segment = self._schedule_chunk(request, end - start, out)
        segment.new_block_ids = [list(t.block_ids) for t in request.block_tables]
        out.segments.append(segment)

    def spare_blocks(self) -> list[int]:
        """Blocks per KV group left once every running request has what it wants."""
        running = [(r, self._max_num_new_tokens(r, r.num_computed_tokens)) for r in self.partials]
        return self.kv.spare(running + [(r, 1) for r in self.decodes])

    def _has_room(self, out: SchedulerOutput) -> bool:
        """Whether a seat and a token of the budget are left."""
        return (
            self.num_running < self.config.max_num_seqs
            and not (self.suspects and out.segments)
            and min(self._tokens_left(out), self._rows_left(out)) > 0
        )

    def _schedule_chunk(
        self, request: Request, num_new_tokens: int, out: SchedulerOutput
    ) -> Segment:
        start = request.num_computed_tokens
        end, request.num_passed_over = start + num_new_tokens, 0
        blocks = self.kv.allocate(request, start, end)
        assert blocks is not None, "a chunk was scheduled without its blocks"
        out.total_num_scheduled_tokens += num_new_tokens
        again = min(end, request.num_computed_before) - start
        out.counts.recomputed_tokens += max(again, 0)
        if self.shares_in_step:
            out.named += self.kv.name_blocks(request, start, end)
        state = None
        if self._states is not None:
            state = self._states.slots_of_chunk(request, end, out)
        return Segment(request, start, num_new_tokens, blocks, state)

    def _tokens_left(self, out: SchedulerOutput, request: Request | None = None) -> int:
        """How many more tokens the step may compute, of a request if one is given."""
        left = self.config.max_num_batched_tokens - out.total_num_scheduled_tokens
        if request is None or not request.max_chunk:
            return left
        prefills = out.segments[out.num_decodes :]
        limited = sum(s.num_scheduled for s in prefills if s.request.max_chunk)
        return min(left, request.max_chunk - limited)

    def _rows_left(self, out: SchedulerOutput, context: int = 0) -> int:
        """How many rows behind `context` tokens the step still has time for."""
        if self.limit is None:
            return self.config.max_num_batched_tokens
        is_alone = self.num_running + len(self.waiting) == 1 and not self.decodes
        return self.limit.rows_left(out, context, is_alone)

    def _chunk(self, request: Request, start: int, out: SchedulerOutput) -> int:
        """How many tokens from `start` on the request may compute in what is left of the step.
        Counts if a span needs more."""
        left = min(self._max_num_new_tokens(request, start), self._tokens_left(out, request))
        if rows := self._rows_left(out, start):
            rows = max(rows, dict(request.spans).get(start, 0) - start)  # a span may take longer
        left = min(left, rows)
        num_new_tokens = request.last_end(start + left) - start
        if num_new_tokens <= 0 < left:
            request.num_passed_over += 1
            self._passed_over = max(self._passed_over, request.num_passed_over)
        return num_new_tokens

    def _max_num_new_tokens(self, request: Request, start: int) -> int:
        """How many tokens from `start` on the request may compute in an otherwise empty step."""
        gap = request.num_tokens - start
        config = self.config
        threshold = config.long_prefill_token_threshold or gap
        work = MAX_CHUNK_TIMES_CONTEXT // (start + 1)
        return min(gap, config.max_num_batched_tokens, threshold, request.max_chunk or gap, work)

    # Out of blocks

    def _break_deadlock(self, out: SchedulerOutput) -> None:
        """No request can continue: preempt until the first partial prefill gets blocks."""
        first = self.partials[0]
        self._resume(out, [first])  # a decode may just have preempted itself
        while out.is_empty:
            victim = self._preempt_lowest(out)
            assert victim is not first, "a request alone has all the blocks it needs"
            self._resume(out, [first])
        self._resume(out, self.partials[1:])

    def _preempt_lowest(self, out: SchedulerOutput) -> Request:
        last = [queue[-1] for queue in (self.partials, self.decodes) if queue]
        victim = max(last, key=SORT_KEY)
        # Steps are filled in this order, so the victim is not in this step yet.
        assert all(s.request is not victim for s in out.segments), "the victim is in this step"
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(victim)
        out.preempted.append(victim)
        return victim

    def _requeue(self, request: Request) -> None:
        """Release seat and blocks, and queue the request to recompute all its tokens."""
        self._unseat(request)
        before = max(request.num_computed_before, request.num_computed_tokens)
        request.num_computed_before, request.num_computed_tokens = before, 0
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def _unseat(self, request: Request) -> None:
        if not self.decodes.discard(request):
            self.partials.discard(request)
        if self._states is not None:
            self._states.free(request)
        self.kv.free(request)
