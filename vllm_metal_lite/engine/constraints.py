"""Constraints of running answers: masks for a step's rows, and tokens known without sampling.

A step is launched before the tokens of the previous step are known, and a mask needs them.  So only
the sampling waits: the masks are made while the device runs the step's forward.

Where a grammar allows one continuation only, the tokens are known.  The step in flight samples the
first of them under its mask.  The next step computes all of them as the rows of one segment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_metal_lite.batch.forward_batch import NO_DRAFT, UNKNOWN_TOKEN
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling.masks import Constraint, TokenMasks, pack_mask
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

# Fewer forced tokens than this get no segment of their own.
MIN_FORCED = 2


@dataclass(slots=True)
class _Constrained:
    """The constraint of one answer.

    packs: whether forced tokens become a segment of their own.
    num_accepted: how many tokens the constraint has seen.
    masks[i]: the tokens that the row after i drafts may sample; None: any token.
    """

    constraint: Constraint
    packs: bool
    num_accepted: int = 0
    masks: list[np.ndarray | None] = field(default_factory=list)

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
        # The next tokens of requests for which a step in flight samples the first.
        self._forced: dict[Request, list[int]] = {}

    def add(self, request: Request, constraint: Constraint, params: SamplingParams) -> None:
        """Constrain a request that has no tokens of its own yet; it gets the tokens that are known
        already."""
        # Forced tokens are not sampled: they have no log-probabilities, and logit_bias,
        # allowed_token_ids and bad_words do not apply to them.
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
        it, at most `most` in all.  Keeps the masks of their rows."""
        if (entry := self._of.get(request)) is None:
            return list(draft)
        constraint, pending = entry.constraint, list(draft)
        found: list[int] = []
        entry.masks = []
        while True:
            entry.masks.append(bits := self._bits(constraint))
            if bits is not None and pending and not bits[pending[0] // 32] >> pending[0] % 32 & 1:
                pending = []
            pending = pending or constraint.forced()[: most - len(found)]
            if not pending:
                break
            constraint.accept(token := pending.pop(0))
            found.append(token)
        if found:
            constraint.rollback(len(found))
        return found

    def masks_behind(self, requests: Sequence[Request], drafts: np.ndarray) -> TokenMasks | None:
        """The tokens that may follow the drafts (R, K) of R requests."""
        found: dict[int, np.ndarray | None] = {}
        for row, request in enumerate(requests):
            if (entry := self._of.get(request)) is not None:
                self.continued(request, drafts[row].tolist(), drafts.shape[1])
                found[row] = entry.masks[-1]
        return _stacked(found)

    def _bits(self, constraint: Constraint) -> np.ndarray | None:
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        return bits if constraint.fill(bits) else None

    def masks(self, requests: Sequence[Request], drafts: Sequence[int]) -> TokenMasks | None:
        """The tokens that the rows of a step may sample.  requests: the request of each row.
        drafts: see ForwardBatch.draft_token_ids.

        Keeps the next tokens of requests where they are known.
        """
        found: dict[int, np.ndarray | None] = {}
        depth = 0
        for row, request in enumerate(requests):
            if (entry := self._of.get(request)) is None:
                continue
            has_draft = len(drafts) > 0 and drafts[row] != NO_DRAFT
            if has_draft or depth:
                found[row] = entry.masks[depth]
                depth = depth + 1 if has_draft else 0
            elif entry.packs and len(forced := entry.constraint.forced()) >= MIN_FORCED:
                self._forced[request] = forced
                found[row] = pack_mask(forced[:1], self._vocab_size)
            else:
                found[row] = self._bits(entry.constraint)
        return _stacked(found)

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

    def take_forced(self) -> dict[Request, list[int]]:
        """The forced tokens of a step, for `Scheduler.advance`."""
        forced, self._forced = self._forced, {}
        return forced

    def accept_forced(self, request: Request, token_ids: Sequence[int]) -> None:
        """Record forced tokens that `Scheduler.advance` appended."""
        self._of[request].accept(token_ids)

    def rollback(self) -> None:
        """Forget the tokens that requests have lost with a step that failed."""
        self._accepted, self._forced = None, {}
        for request, entry in self._of.items():
            num_lost = entry.num_accepted - (request.num_tokens - request.num_prompt_tokens)
            if num_lost:
                entry.constraint.rollback(num_lost)
                entry.num_accepted -= num_lost


def _stacked(bits_of: dict[int, np.ndarray | None]) -> TokenMasks | None:
    """The masks of these rows; None: no row has one."""
    masks = {row: bits for row, bits in bits_of.items() if bits is not None}
    return TokenMasks(np.array([*masks]), np.stack([*masks.values()])) if masks else None
