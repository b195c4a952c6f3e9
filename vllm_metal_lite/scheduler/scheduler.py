"""Decides which tokens the next step computes.  docs/scheduling.md explains the rules.

A step closes part of the gaps of requests (request.py):
1. decodes (requests whose prompt is computed) get one token each, or several that are known;
2. partial prefills resume;
3. waiting requests are admitted.
Each phase takes requests in the order of (priority, fair_round, arrival), up to
`max_num_batched_tokens` and `max_num_seqs`.

Where all tokens are known, a decode may be lengthened by drafts (drafts.py): rows of tokens that
the request will probably have.  They take only what the step leaves over.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import le, sub

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.config import MAX_MODEL_DRAFTS, EngineConfig
from vllm_metal_lite.scheduler.chunk_sizes import ChunkSizes
from vllm_metal_lite.scheduler.drafts import Propose
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.kv_manager import NewBlocks, PrefixHit
from vllm_metal_lite.scheduler.progress import Progress
from vllm_metal_lite.scheduler.request import SORT_KEY, Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment
from vllm_metal_lite.scheduler.step_limit import StepLimit

# Requests that admission may skip in a step: they wait for a leader, for the disk, or for tokens.
_MAX_PASSED = 64


class Scheduler(Progress):
    """Chooses what the next step computes.

    groups: the store's KV groups.  max_model_len: longest context, in tokens.  num_state_slots: of
    recurrent states; 0 if the model keeps none.  max_draft_states: see StateScheduler.  must_wait:
    whether a request waits until its prefix is read from the disk.  limit: keeps steps short.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[KVGroup],
        max_model_len: int,
        num_state_slots: int = 0,
        max_draft_states: int = MAX_MODEL_DRAFTS,
        must_wait: Callable[[Request, PrefixHit], bool] = lambda request, hit: False,
        limit: StepLimit | None = None,
    ) -> None:
        super().__init__(config, groups, num_state_slots, max_draft_states)
        self.config = config
        self.max_model_len = max_model_len
        self.must_wait, self.limit = must_wait, limit
        self.num_preemptions = 0
        self._sizes = ChunkSizes(config)
        self._num_added = 0
        self._prefilled_last = False

    # Add requests

    def add(self, request: Request) -> None:
        """Queue a request.  Raises RequestError, changing nothing, if it could never finish."""
        request.max_length = self._sizes.check(request, self.max_model_len, self.kv)
        # The number orders requests of equal arrival (the n answers of one prompt).
        request.sort_key = (*request.sort_key, self._num_added)
        self._num_added += 1
        self.waiting.add(request)

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
        if out.is_empty and self.chunked:
            self._break_deadlock(out)
        self._prefilled_last = any(s.is_prompt for s in out.segments[out.num_decodes :])
        if propose is not None:
            self.drafts.add(out, propose, self._sizes.drafts_left(out), self.num_running)
        # InputBatch.pack wants segments of one token first, prompts' one-token chunks included.
        prefills = out.segments[out.num_decodes :]
        if len(prefills) > 1:
            prefills.sort(key=lambda s: s.num_scheduled > 1)
            out.segments[out.num_decodes :] = prefills
        return out

    def schedule_alone(self, requests: Iterable[Request]) -> SchedulerOutput:
        """A step of the first of these suspects that can run now.  Empty if none can: then others
        must run first, since they hold the blocks."""
        self.unlaunched = out = SchedulerOutput()
        is_alone = self.num_running + len(self.waiting) == 1 and not self.decodes
        self._sizes.begin_step(self.limit, is_alone)
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

    # The three phases

    def _schedule_decodes(self, out: SchedulerOutput) -> None:
        self._decode(out, self.decodes)
        self._resume(out, [r for r in self.chunked if not r.is_prompt(r.num_computed_tokens)])

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
            if (start + 1) % block_size == 0:
                if request.token_ids[-1] == UNKNOWN_TOKEN:
                    self._unnamed.append((out, request))
                else:
                    out.named += self.kv.name_blocks(request, start, start + 1)
        out.num_decodes = out.total_num_scheduled_tokens = len(out.segments)

    def _schedule_prefills(self, out: SchedulerOutput) -> None:
        prompts = self._prompts
        self._sizes.begin_prompts()
        self._resume(out, prompts)
        # A preempted request is admitted first, and there are no blocks for it now.
        if not out.preempted:
            self._admit(out, self.waiting, starting=not prompts)

    @property
    def _policy(self) -> str:
        """What the next step may hold, see docs/scheduling.md."""
        policy = self.config.prefill_policy
        is_overdue = self._sizes.is_overdue(after_prompts=self._prefilled_last)
        return "alternate" if policy == "mixed" and is_overdue else policy

    @property
    def _prompts(self) -> list[Request]:
        return [r for r in self.chunked if r.is_prompt(r.num_computed_tokens)]

    def _resume(self, out: SchedulerOutput, partials: Iterable[Request]) -> None:
        for request in partials:
            start, room = request.num_computed_tokens, self.kv.room(request)
            num_new_tokens = self._sizes.next_chunk(request, start, out)
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
                states is not None and states.follows(request, start, out, self.chunked)
            ):
                at += 1
                continue
            num_new_tokens = self._sizes.next_chunk(request, start, out)
            if num_new_tokens <= 0 and self._sizes.may_pass(request):
                at += 1
                continue
            cost = self.kv.cost(request, hit, self._sizes.most(request, start))
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
        self.chunked.add(request)
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
        """How many blocks of each KV group are left after every running request gets its own."""
        running = [(r, self._sizes.most(r, r.num_computed_tokens)) for r in self.chunked]
        return self.kv.spare(running + [(r, 1) for r in self.decodes])

    def _has_room(self, out: SchedulerOutput) -> bool:
        """Whether a seat and a token of the budget are left."""
        return (
            self.num_running < self.config.max_num_seqs
            and not (self.suspects and out.segments)
            and min(self._sizes.tokens_left(out), self._sizes.rows_left(out)) > 0
        )

    def _schedule_chunk(
        self, request: Request, num_new_tokens: int, out: SchedulerOutput
    ) -> Segment:
        start = request.num_computed_tokens
        end = start + num_new_tokens
        self._sizes.got_chunk(request)
        blocks = self.kv.allocate(request, start, end)
        assert blocks is not None, "a chunk was scheduled without its blocks"
        out.total_num_scheduled_tokens += num_new_tokens
        again = min(end, request.num_computed_before) - start
        out.counts.recomputed_tokens += max(again, 0)
        out.named += self.kv.name_blocks(request, start, end)
        state = None
        if self._states is not None:
            state = self._states.slots_of_chunk(request, end, out)
        return Segment(request, start, num_new_tokens, blocks, state)

    # Out of blocks

    def _break_deadlock(self, out: SchedulerOutput) -> None:
        """No request can continue: preempt until the first partial prefill gets blocks."""
        first = self.chunked[0]
        self._resume(out, [first])  # a decode may just have preempted itself
        while out.is_empty:
            victim = self._preempt_lowest(out)
            assert victim is not first, "a request alone has all the blocks it needs"
            self._resume(out, [first])
        self._resume(out, self.chunked[1:])

    def _preempt_lowest(self, out: SchedulerOutput) -> Request:
        last = [queue[-1] for queue in (self.chunked, self.decodes) if queue]
        victim = max(last, key=SORT_KEY)
        # Steps are filled in this order, so the victim is not in this step yet.
        assert all(s.request is not victim for s in out.segments), "the victim is in this step"
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(victim)
        out.preempted.append(victim)
        return victim
