"""Constraints of running answers: masks for a step's rows, and tokens known without sampling.

A step is launched before the tokens of the previous step are known, and a mask needs them.  So only
the sampling waits: the masks are made while the device runs the step's forward.

Where a grammar allows one continuation only, the tokens are known.  The step in flight samples the
first of them under its mask.  The next step computes all of them as the rows of one segment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.batch.forward_batch import NO_DRAFT, UNKNOWN_TOKEN
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling.constraint import Constraint
from vllm_metal_lite.sampling.masks import TokenMasks, pack_mask
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

# Tokens known in advance that are worth a segment of their own.
MIN_FORCED = 2


@dataclass(slots=True)
class _Constrained:
    """num_accepted: tokens that the constraint has seen.  packs: forced tokens become a segment."""

    constraint: Constraint
    packs: bool
    num_accepted: int = 0

    def accept(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.constraint.accept(token_id)
            self.num_accepted += 1


class Constraints:
    """The constraints of an engine's unfinished answers."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._of: dict[Request, _Constrained] = {}
        self._accepted: SchedulerOutput | None = None  # the last step whose tokens were accepted

    def add(self, request: Request, constraint: Constraint, params: SamplingParams) -> None:
        """Constrain a request that has no tokens of its own yet; it gets the tokens that are known
        already."""
        # Forced tokens are not sampled: they have no log-probabilities, and meet no other limit.
        others = (params.logit_bias, params.allowed_token_ids, params.bad_words, params.logprobs)
        entry = _Constrained(constraint, all(limit is None for limit in others))
        self._of[request] = entry
        if entry.packs:
            # The last token ends the answer, so it is sampled.
            room = request.max_length - request.num_prompt_tokens - 1
            request.token_ids += (forced := constraint.forced()[:room])
            entry.accept(forced)

    def remove(self, request: Request) -> None:
        self._of.pop(request, None)

    def __contains__(self, request: Request) -> bool:
        return request in self._of

    def continued(self, request: Request, draft: Sequence[int], most: int) -> list[int]:
        """The part of a draft that a request's constraint accepts, and the forced tokens behind
        it: at most `most`."""
        if (entry := self._of.get(request)) is None:
            return list(draft)
        constraint, bits, count = entry.constraint, self._no_bits(), 0
        for token in draft:
            if constraint.fill(bits) and not bits[token // 32] >> (token % 32) & 1:
                break
            constraint.accept(token)
            count += 1
        found = [*draft[:count], *constraint.forced()][:most]
        if count:
            constraint.rollback(count)
        return found

    def _no_bits(self) -> np.ndarray:
        return np.zeros(-(-self._vocab_size // 32), np.uint32)

    def masks(self, requests: Sequence[Request], drafts: Sequence[int] = ()) -> TokenMasks | None:
        """The tokens that the rows of a step may sample.  requests: of each row.  drafts: see
        ForwardBatch.draft_token_ids.

        Sets `forced_token_ids` of requests whose next tokens are known.
        """
        rows, masks, depth = [], [], 0
        for row, request in enumerate(requests):
            if (entry := self._of.get(request)) is None:
                continue
            draft = drafts[row] if len(drafts) else NO_DRAFT
            # Behind drafts, the next tokens depend on which of them come true.
            packs = entry.packs and draft == NO_DRAFT and not depth
            forced = entry.constraint.forced() if packs else []
            request.forced_token_ids = forced if len(forced) >= MIN_FORCED else []
            bits = self._no_bits()
            if request.forced_token_ids:
                bits, is_limited = pack_mask(forced[:1], self._vocab_size), True
            else:
                is_limited = entry.constraint.fill(bits)
            if is_limited:
                rows.append(row)
                masks.append(bits)
            if draft != NO_DRAFT:
                entry.constraint.accept(draft)
                depth += 1
            elif depth:
                entry.constraint.rollback(depth)
                depth = 0
        return TokenMasks(np.array(rows), np.stack(masks)) if rows else None

    def accept(self, output: SchedulerOutput, result: StepResult) -> None:
        """Record the tokens of a step after `Scheduler.advance`; waits for them.  Later calls
        for the same step do nothing."""
        if output is self._accepted or not self._of:
            return
        self._accepted = output
        for rows, request in zip(result.live_rows, output.terminal, strict=True):
            # A token that is known here was forced, and is recorded.
            is_new = request.token_ids[-1] == UNKNOWN_TOKEN
            if is_new and (entry := self._of.get(request)) is not None:
                entry.accept(int(result.token_ids[r]) for r in rows if r not in result.no_token)

    def accept_forced(self, request: Request, token_ids: Sequence[int]) -> None:
        """Record forced tokens that `Scheduler.advance` appended."""
        self._of[request].accept(token_ids)

    def rollback(self) -> None:
        """Forget the tokens that requests have lost with a step that failed."""
        self._accepted = None
        for request, entry in self._of.items():
            num_lost = entry.num_accepted - (request.num_tokens - request.num_prompt_tokens)
            if num_lost:
                entry.constraint.rollback(num_lost)
                entry.num_accepted -= num_lost
