"""Decides how many tokens of a request a step computes.

A step holds at most `max_num_batched_tokens`, and a request may have a lower limit.  A span is
computed by one step: a chunk ends before a span that it cannot hold.  A request whose next span
does not fit is passed over, and later requests use the tokens.  After _PATIENCE steps no later
request is admitted before it.  One picture may start in a step, so that others wait for the tower
once.  A request that could never finish is refused when it is added.
"""

from weakref import WeakKeyDictionary

from vllm_metal_lite.config import MAX_CHUNK_TIMES_CONTEXT, EngineConfig
from vllm_metal_lite.errors import Option, RequestError, show
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.scheduler.step_limit import StepLimit

# Steps in which prompts may take the tokens that an earlier request's span needs.
_PATIENCE = 8


class ChunkSizes:
    """The limits of steps, and which requests they have passed over."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        # Steps in a row whose last tokens did not suffice for a request's next span.
        self._num_passed_over: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        # The highest of these numbers in the last step with prompts.
        self._most_passed_over = 0
        self._limit: StepLimit | None = None
        self._is_alone = False

    def begin_step(self, limit: StepLimit | None, is_alone: bool) -> None:
        """limit: follows the times of steps.  is_alone: a prompt is the only request."""
        self._limit, self._is_alone = limit, is_alone

    # Requests that could never finish

    def check(self, request: Request, max_model_len: int, kv: KVCacheManager) -> int:
        """The most tokens that a request may reach, its prompt included.

        Raises RequestError, with the numbers, if the request could never finish: it has no room for
        a token, needs more blocks than the store has, or has a span that no step can hold.
        """
        prompt, room = request.num_prompt_tokens, max_model_len + request.only_reads
        if prompt >= room:
            raise RequestError(
                f"request {show(request.request_id)} has a prompt of {prompt} tokens; ",
                Option("max_model_len"),
                f" ({max_model_len}) leaves room for {room - 1}",
                "" if request.only_reads else " and a new one",
            )
        # The last token sampled is never computed, so it is never stored.
        max_length = min(prompt + request.max_tokens, room)
        if sizes := kv.too_large(max_length - 1, request.spans):
            size = f"{prompt} prompt tokens + max_tokens {request.max_tokens}"
            if request.spans:
                size += (
                    f", spans of up to {max(end - start for start, end in request.spans)} tokens"
                )
            raise RequestError(
                f"request {show(request.request_id)} ({size}) needs {sizes[0]} blocks of "
                f"{kv.block_size} tokens; the store has {sizes[1]}"
            )
        for start, end in request.spans:
            most = self.most(request, start)
            if end - start > most:
                limits: dict[int, Option | str] = {request.max_chunk: "prompt_logprobs"}
                for name in ("long_prefill_token_threshold", "max_num_batched_tokens"):
                    limits[getattr(self.config, name)] = Option(name)
                raise RequestError(
                    f"request {show(request.request_id)} has a span from {start} to {end}, "
                    f"{end - start} tokens; a step computes at most {most} of them (",
                    limits.get(most, f"behind a context of {start} tokens"),
                    ")",
                )
        return max_length

    # Spans

    def begin_prompts(self) -> None:
        """The step now turns to prompts."""
        self._most_passed_over = 0

    def is_overdue(self, after_prompts: bool) -> bool:
        """Whether a span should have a step without decodes.  Decodes leave it too few tokens only
        as long as other prompts use these.  after_prompts: the last step had prompts."""
        return self._most_passed_over >= (_PATIENCE if after_prompts else 1)

    def may_pass(self, request: Request) -> bool:
        """Whether later requests may be admitted before one that gets no tokens."""
        return 0 < self._num_passed_over.get(request, 0) < _PATIENCE

    def got_chunk(self, request: Request) -> None:
        self._num_passed_over.pop(request, None)

    # Tokens

    def next_chunk(self, request: Request, start: int, out: SchedulerOutput) -> int:
        """How many tokens from `start` on the request may compute in what is left of the step.
        Counts if a span needs more."""
        left = min(self.most(request, start), self.tokens_left(out, request))
        if rows := self.rows_left(out, start):
            rows = max(rows, dict(request.spans).get(start, 0) - start)  # a span may take longer
        left = min(left, rows)
        if request.pictures is not None:
            may_start = not any(s.starts_picture for s in out.segments)
            left = request.pictures.end_of_chunk(start, start + left, may_start) - start
        num_new_tokens = request.last_end(start + left) - start
        if num_new_tokens <= 0 < left:
            num_passed_over = self._num_passed_over.get(request, 0) + 1
            self._num_passed_over[request] = num_passed_over
            self._most_passed_over = max(self._most_passed_over, num_passed_over)
        return num_new_tokens

    def most(self, request: Request, start: int) -> int:
        """How many tokens from `start` on the request may compute in an otherwise empty step."""
        gap, config = request.num_tokens - start, self.config
        threshold = config.long_prefill_token_threshold or gap
        work = MAX_CHUNK_TIMES_CONTEXT // (start + 1)
        return min(gap, config.max_num_batched_tokens, threshold, request.max_chunk or gap, work)

    def tokens_left(self, out: SchedulerOutput, request: Request | None = None) -> int:
        """How many more tokens the step may compute, of a request if one is given."""
        left = self.config.max_num_batched_tokens - out.total_num_scheduled_tokens
        if request is None or not request.max_chunk:
            return left
        return min(left, request.max_chunk - _num_limited(out))

    def rows_left(self, out: SchedulerOutput, context: int = 0) -> int:
        """How many rows behind `context` tokens the step still has time for."""
        if self._limit is None:
            return self.config.max_num_batched_tokens
        return self._limit.rows_left(out, context, self._is_alone)

    def drafts_left(self, out: SchedulerOutput) -> int:
        """How many drafts a step may get after everything else."""
        rows = self.config.max_logits_rows - len(out.segments) - _num_limited(out)
        context = max((s.num_computed for s in out.segments[: out.num_decodes]), default=0)
        return min(self.tokens_left(out), self.rows_left(out, context), rows)


def _num_limited(out: SchedulerOutput) -> int:
    """How many tokens of requests with a max_chunk the step computes."""
    return sum(s.num_scheduled for s in out.segments[out.num_decodes :] if s.request.max_chunk)
