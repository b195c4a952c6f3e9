"""Which tokens the next step computes.  The rules in plain words: docs/scheduling.md.

A request has no phases, only a gap: `num_tokens - num_computed_tokens`.  A step closes part of it:
1. requests that decode (their prompt is done) get their one token each;
2. partial prefills resume;
3. waiting requests are admitted;
each in the order of rank = (priority, arrival), under `max_num_batched_tokens` and `max_num_seqs`.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.request import Request, RequestStatus
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.kv.block_pool import BlockPool
from vllm_metal_lite.kv.prefix_hash import extend_block_hashes

_RANK = attrgetter("rank")


@dataclass(slots=True)
class Segment:
    """Tokens [num_computed, num_computed + num_scheduled) of a request.

    new_block_ids: to be added to its block table; for an admitted request, all of its blocks.
    """

    request: Request
    num_computed: int
    num_scheduled: int
    new_block_ids: Sequence[int]


@dataclass(slots=True)
class SchedulerOutput:
    """One step.  The caller runs it and then calls `update`, or `rollback` if it failed.

    segments: one a request, those of one token first.  num_decodes: how many of the first segments
    are decodes; the other segments are (chunks of) prefills.
    admitted: requests that got a seat, new or resumed.  preempted: requests that lost theirs; to be
    taken note of first, even if the step is empty.
    """

    segments: list[Segment] = field(default_factory=list)
    num_decodes: int = 0
    total_num_scheduled_tokens: int = 0
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    published: list[int] = field(default_factory=list)  # blocks that got their names in this step

    @property
    def is_empty(self) -> bool:
        return not self.segments


class Scheduler:
    """Holds every unfinished request, and the blocks of the store.

    num_blocks, max_model_len: the store's size in blocks, the longest context in tokens.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.pool = BlockPool(num_blocks, config.enable_prefix_caching)
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.prefix_hit_tokens = 0
        self.prefix_queried_tokens = 0
        self._block_size = config.block_size
        self._requests: dict[str, Request] = {}
        # Each unfinished request is in exactly one of these, which are kept in order of rank.
        self._waiting: list[Request] = []
        self._partials: list[Request] = []
        self._decodes: list[Request] = []
        self._num_added = 0
        self._prefilled_last = False

    @property
    def num_running(self) -> int:
        return len(self._partials) + len(self._decodes)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a request.  Raises RequestError if it could never finish; nothing has changed."""
        name, prompt = f"request {request.request_id!r}", request.num_prompt_tokens
        if request.request_id in self._requests:
            raise RequestError(f"{name} is already in use")
        if prompt == 0:
            raise RequestError(f"{name} has an empty prompt: it must have at least one token")
        if request.max_tokens < 1:
            raise RequestError(f"{name}: max_tokens must be at least 1, got {request.max_tokens}")
        if prompt >= self.max_model_len:
            raise RequestError(
                f"{name} has a prompt of {prompt} tokens; max_model_len ({self.max_model_len}) "
                f"leaves room for {self.max_model_len - 1} and one new token"
            )
        # The last token sampled is never computed, so it is never stored.
        num_stored = min(prompt + request.max_tokens, self.max_model_len) - 1
        size = f"{prompt} prompt tokens + max_tokens {request.max_tokens}"
        max_blocks = self._blocks(num_stored)
        if max_blocks > self.pool.num_blocks:
            raise RequestError(
                f"{name} ({size}) needs {max_blocks} blocks of {self._block_size} tokens, "
                f"the store has {self.pool.num_blocks}"
            )
        # Preempted just before its last token, it has to fit one step with all it generated.
        if request.atomic and num_stored > self.config.max_num_batched_tokens:
            raise RequestError(
                f"{name} is atomic and may need {num_stored} tokens ({size}) in one step; "
                f"max_num_batched_tokens is {self.config.max_num_batched_tokens}"
            )
        request.max_blocks = max_blocks
        # The count sets apart what has the same arrival (the n answers of one prompt).
        request.rank = (request.priority, request.arrival, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_RANK)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and its blocks back; unknown ones are ignored."""
        if self._requests.get(request.request_id) is not request:
            return
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._unseat(request)
        else:
            _remove(self._waiting, request)
        request.status = RequestStatus.FINISHED

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks."""
        self.pool.reset()

    # Steps

    def schedule(self) -> SchedulerOutput:
        """Decide the next step.  While a request is unfinished, at least one token is scheduled."""
        out = SchedulerOutput()
        if self.config.prefill_policy == "mixed":
            self._schedule_decodes(out)
            self._schedule_prefills(out)
        else:
            turns = [self._schedule_decodes, self._schedule_prefills]
            whole = self.config.prefill_policy == "whole"
            if not self._prefilled_last or (whole and self._partials):
                turns.reverse()
            turns[0](out)
            if out.is_empty:
                turns[1](out)
        if out.is_empty and self._partials:
            self._break_deadlock(out)
        if not out.is_empty:
            self._prefilled_last = out.num_decodes < len(out.segments)
        # InputBatch.pack wants segments of one token first; the last token of a prompt is one too.
        prefills = out.segments[out.num_decodes :]
        if len(prefills) > 1:
            prefills.sort(key=lambda s: s.num_scheduled > 1)
            out.segments[out.num_decodes :] = prefills
        return out

    def update(self, output: SchedulerOutput, token_ids: Sequence[int]) -> None:
        """Take note of a step that was run.

        token_ids: ints, one for each segment that ends at its request's last token, in order.
        A request finished since `schedule` keeps its place in `token_ids`, and is passed over.
        """
        decodes, prefills = output.segments[: output.num_decodes], output.segments[
            output.num_decodes :
        ]  # fmt: skip
        terminal = [s for s in prefills if s.num_computed + s.num_scheduled == s.request.num_tokens]
        if len(token_ids) != len(decodes) + len(terminal):
            raise ValueError(
                f"{len(token_ids)} tokens for {len(decodes) + len(terminal)} segments that want one"
            )
        tokens = iter(token_ids)
        for segment in decodes:
            self._advance(segment, next(tokens))
        for request in output.admitted:
            if self._reads_cache(request) and not request.num_computed_before:
                self.prefix_hit_tokens += request.num_cached_tokens
                self.prefix_queried_tokens += request.num_tokens
        for segment in prefills:
            request, end = segment.request, segment.num_computed + segment.num_scheduled
            again = min(end, request.num_computed_before) - segment.num_computed
            self.num_recomputed_tokens += max(again, 0)
            if end < request.num_tokens:
                self._advance(segment, None)
            elif self._advance(segment, next(tokens)):
                _remove(self._partials, request)
                insort(self._decodes, request, key=_RANK)

    def rollback(self, output: SchedulerOutput) -> None:
        """Take back a step that failed: its requests wait again, as if they were preempted.

        Blocks that got their names in it were perhaps never written.  Whoever hit them was admitted
        in the same step, and goes back too.
        """
        self.pool.unpublish(output.published)
        for request in output.admitted:
            request.num_computed_tokens = 0
        for segment in output.segments:
            if segment.request.status is RequestStatus.RUNNING:
                self._to_waiting(segment.request)

    # 1. Decodes

    def _schedule_decodes(self, out: SchedulerOutput) -> None:
        block_size = self._block_size
        for request in self._decodes[: self._budget_left(out)]:
            if request.status is not RequestStatus.RUNNING:
                break  # preempted for one before it, and so are all that follow
            new_blocks: Sequence[int] = ()
            if len(request.block_ids) * block_size < request.num_tokens:
                new_blocks = self._reserve_or_preempt(request, out)
                if new_blocks is None:
                    break
            self._schedule_segment(request, 1, new_blocks, out)
            out.num_decodes += 1

    def _reserve_or_preempt(self, request: Request, out: SchedulerOutput) -> list[int] | None:
        """A block for a decode, if need be the lowest in rank's; None if that was the decode."""
        while (blocks := self._reserve(request, request.num_tokens)) is None:
            last = [queue[-1] for queue in (self._partials, self._decodes) if queue]
            victim = max(last, key=_RANK)
            # Decodes go in order of rank, so whatever is scheduled by now ranks above the victim.
            assert victim.rank >= request.rank
            self._preempt(victim, out)
            if victim is request:
                return None
        return blocks

    # 2. and 3. Prefills

    def _schedule_prefills(self, out: SchedulerOutput) -> None:
        blocked = False
        for request in self._partials.copy():
            chunk = self._chunk(request, out)
            held = len(request.block_ids) + self.pool.num_available
            fits = min(chunk, held * self._block_size - request.num_computed_tokens)
            if fits > 0:
                blocks = self._reserve(request, request.num_computed_tokens + fits)
                self._schedule_segment(request, fits, blocks, out)
            blocked |= fits < chunk
        if blocked:
            return  # let what runs drain rather than admit more
        for request in self._waiting.copy():
            if self.num_running >= self.config.max_num_seqs or not self._budget_left(out):
                return
            if not self._admit(request, out) and not request.atomic:
                return

    def _admit(self, request: Request, out: SchedulerOutput) -> bool:
        """Give a waiting request a seat, what the prefix cache holds of it, and its first chunk.

        Reserved is the chunk only, but all of its tokens must fit now, with a block to spare for
        each that runs: or it would soon be preempted, or preempt.
        """
        hits = self._prefix_hits(request)
        self.pool.touch(hits)
        request.num_computed_tokens = len(hits) * self._block_size
        chunk = self._chunk(request, out)
        wanted = self._blocks(request.num_tokens) - len(hits) + self.num_running
        if not chunk or wanted > self.pool.num_available:
            self.pool.free(hits)
            request.num_computed_tokens = 0
            return False
        if not request.num_computed_before:
            request.num_cached_tokens = request.num_computed_tokens
        _remove(self._waiting, request)
        insort(self._partials, request, key=_RANK)
        request.status = RequestStatus.RUNNING
        request.block_ids = hits
        self._reserve(request, request.num_computed_tokens + chunk)
        self._schedule_segment(request, chunk, tuple(request.block_ids), out)
        out.admitted.append(request)
        return True

    def _prefix_hits(self, request: Request) -> list[int]:
        """Blocks of the longest prefix that is cached; never all tokens: the last has to be run."""
        if not self._reads_cache(request):
            return []
        most = (request.num_tokens - 1) // self._block_size
        extend_block_hashes(request.block_hashes, request.token_ids, self._block_size, most)
        hits = []
        for name in request.block_hashes[:most]:
            if (block := self.pool.lookup(name)) is None:
                break
            hits.append(block)
        return hits

    def _chunk(self, request: Request, out: SchedulerOutput) -> int:
        """Tokens that a prefill may get of this step; 0 if an atomic one cannot get all."""
        gap, left = request.num_tokens - request.num_computed_tokens, self._budget_left(out)
        if request.atomic:
            return gap if gap <= left else 0
        caps = (self.config.long_prefill_token_threshold, request.max_chunk)
        return min(gap, left, *(cap for cap in caps if cap))

    def _break_deadlock(self, out: SchedulerOutput) -> None:
        """Partial prefills hold every block and none can go on: the lowest in rank give theirs.

        The last one left fits the store, as `add` made sure.
        """
        while out.is_empty:
            self._preempt(self._partials[-1], out)
            self._schedule_prefills(out)

    # What they share

    def _schedule_segment(
        self, request: Request, count: int, new_block_ids: Sequence[int], out: SchedulerOutput
    ) -> None:
        """Put a segment into the step, and name the blocks that it fills.

        Named before they are written: in each layer all of a step's rows are written before any is
        read, so a request of the same step may share them.
        """
        start = request.num_computed_tokens
        out.segments.append(Segment(request, start, count, new_block_ids))
        out.total_num_scheduled_tokens += count
        first, end = start // self._block_size, (start + count) // self._block_size
        if first < end and self.config.enable_prefix_caching:
            hashes, blocks = request.block_hashes, request.block_ids
            extend_block_hashes(hashes, request.token_ids, self._block_size, end)
            for i in range(first, end):
                if self.pool.publish(blocks[i], hashes[i]):
                    out.published.append(blocks[i])

    def _advance(self, segment: Segment, token_id: int | None) -> bool:
        """Book a segment as computed; False if its request was finished in the meantime."""
        request = segment.request
        if request.status is not RequestStatus.RUNNING:
            return False
        request.num_computed_tokens = segment.num_computed + segment.num_scheduled
        if token_id is not None:
            request.token_ids.append(token_id)
        return True

    def _reserve(self, request: Request, end: int) -> list[int] | None:
        """Blocks for the tokens up to `end`: the new ones, or None, and then nothing changed."""
        blocks = self.pool.allocate(self._blocks(end) - len(request.block_ids))
        if blocks is not None:
            request.block_ids += blocks
        return blocks

    def _preempt(self, request: Request, out: SchedulerOutput) -> None:
        self._to_waiting(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        out.preempted.append(request)

    def _to_waiting(self, request: Request) -> None:
        request.num_computed_before = max(request.num_computed_before, request.num_computed_tokens)
        self._unseat(request)
        request.status = RequestStatus.PREEMPTED
        insort(self._waiting, request, key=_RANK)

    def _unseat(self, request: Request) -> None:
        _remove(self._decodes if _holds(self._decodes, request) else self._partials, request)
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0

    def _reads_cache(self, request: Request) -> bool:
        return self.config.enable_prefix_caching and not request.skip_prefix_cache_read

    def _budget_left(self, out: SchedulerOutput) -> int:
        return self.config.max_num_batched_tokens - out.total_num_scheduled_tokens

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _holds(queue: list[Request], request: Request) -> bool:
    at = bisect_left(queue, request.rank, key=_RANK)
    return at < len(queue) and queue[at] is request


def _remove(queue: list[Request], request: Request) -> None:
    del queue[bisect_left(queue, request.rank, key=_RANK)]
