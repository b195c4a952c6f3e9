"""Decides which decodes get drafts: those where the expected tokens a second rise."""

from collections.abc import Callable, Sequence
from itertools import product, takewhile
from weakref import WeakKeyDictionary

import numpy as np

from vllm_metal_lite.config import MAX_DRAFT
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.speculation.lookup import look_up
from vllm_metal_lite.speculation.pace import PLAIN, Pace

# These numbers were chosen by hand; docs/speculation.md measures them together.
_CAPS = (MAX_DRAFT, 15, 7, 3)  # lengths that are weighed against each other
# Drafts by the drafter begin at the first expected gain, and end below the second: what lies
# between is within measurement noise.  Looked-up drafts need the first.
_BEGIN, _KEEP = 1.1, 1.0
_LOOKUPS = 8  # requests looked at before a step is launched ahead
# After this many steps without drafts, only each _EVERY-th step is looked at: looking takes time.
_PATIENCE, _EVERY = 16, 4
# After its last drafts, a head follows this number of plain steps, times the share of right drafts.
_PAUSE = 32
_FIRST_RATE = 0.8  # assumed share of drafts that are accepted
_WEIGHT = 5  # how many drafts this assumption counts for
_MIN_REJECTED = 1e-3  # a rate stays below 1
# The factor of both counts at each draft, and the share of the way back to the first counts per
# step without a draft: of a request, and of all requests together.
_FADE, _RECOVER = 0.95, 0.02
_FADE_OF_ALL, _RECOVER_OF_ALL = 0.98, 0.0005


class _Record:
    """How many drafts from one source were accepted, of a request or of all.  A draft behind a
    rejected one does not count: nothing is known of it."""

    __slots__ = ("accepted", "rejected")

    def __init__(self, rate: float = _FIRST_RATE) -> None:
        self.accepted, self.rejected = _WEIGHT * rate, _WEIGHT * (1 - rate)

    @property
    def rate(self) -> float:
        """The probability that a draft is accepted after an accepted draft."""
        return self.accepted / (self.accepted + self.rejected)

    def record(self, num_accepted: int, num_drafts: int, fade: float = _FADE) -> None:
        self.accepted = self.accepted * fade + num_accepted
        self.rejected = max(self.rejected * fade + (num_accepted < num_drafts), _MIN_REJECTED)

    def recover(self, rate: float = _FIRST_RATE, share: float = _RECOVER) -> None:
        """Move the counts towards those of `rate` after a step without drafts: other text may have
        come by now."""
        self.accepted += (_WEIGHT * rate - self.accepted) * share
        self.rejected += (_WEIGHT * (1 - rate) - self.rejected) * share

    def expected(self, num_drafts: int) -> float:
        """The expected number of accepted drafts."""
        p = self.rate
        return p * (1 - p**num_drafts) / (1 - p) if num_drafts else 0.0


class _History:
    """The past drafts of a request.  records: (lookup's, the drafter's).  proposed: the last draft,
    before any constraint.  of_last: the record of that draft's source."""

    __slots__ = ("of_last", "proposed", "records")

    def __init__(self, rate_of_drafter: float) -> None:
        self.records = _Record(), _Record(rate_of_drafter)
        self.proposed: Sequence[int] = ()
        self.of_last = self.records[0]


# The drafter: pairs (request, the most tokens) -> the drafts of each request.
Draft = Callable[[Sequence[tuple[Request, int]]], Sequence[list[int]]]


class Speculator:
    """Decides on drafts, and records how many are accepted.

    While a step is in flight, `wants` says whether the next one should wait for its tokens, and so
    have drafts; otherwise the next one is launched ahead.  While it waits, `num_ahead` says how
    many tokens the drafter drafts already.  Once the tokens are known, `propose` makes the drafts.
    `_choose` weighs lengths for all three.

    tokens_of: returns the known tokens of a running request, (n,) int32.
    draft: asks the drafter, for at most max_model_drafts a request; 0: there is no drafter.
    """

    def __init__(
        self,
        tokens_of: Callable[[Request], np.ndarray],
        draft: Draft | None = None,
        max_model_drafts: int = 0,
    ) -> None:
        self._tokens_of, self._draft = tokens_of, draft
        self.max_model_drafts = max_model_drafts if draft is not None else 0
        self.pace = Pace()
        self._drafter = _Record()  # of all requests: where a new one starts
        self._histories = WeakKeyDictionary[Request, _History]()  # forgotten with the request
        self._num_model_drafts = 0  # of the last step, as in Pace
        self._num_since_drafter = 0  # steps since the drafter made drafts
        self._turn = self._num_refused = 0

    @property
    def expects_drafts(self) -> bool:
        """Whether a head also follows plain steps: gaps in its K and V would harm its next drafts.
        The fewer of its drafts were right, the sooner it stops."""
        is_soon = self._num_since_drafter < _PAUSE * self._drafter.rate
        return is_soon and not self.pace.lacks_plain

    def wants(self, decodes: Sequence[Request]) -> bool:
        """Whether the next step will probably have drafts: they start from the tokens in flight."""
        self._num_refused += 1
        if self._num_refused > _PATIENCE and self._num_refused % _EVERY:
            return False
        count = min(len(decodes), _LOOKUPS)
        self._turn += count
        looked_at = [decodes[(self._turn + i) % len(decodes)] for i in range(count)]
        # The first of these drafts is the token in flight.
        drafts = [self._look_up(request, MAX_DRAFT + 1)[1:] for request in looked_at]
        limits = [MAX_DRAFT] * count
        wants = any(self._choose(looked_at, limits, drafts, len(decodes)))
        self._num_refused *= not wants
        return wants

    def num_ahead(self, requests: Sequence[Request]) -> int:
        """How many tokens the drafter should draft for each of these requests, before the tokens in
        flight are known; 0: none, or a lookup will probably find more."""
        some = requests[:_LOOKUPS]
        if not some or not self.max_model_drafts or any(map(self._was_looked_up, some)):
            return 0
        limits = [self.max_model_drafts] * len(some)
        return self._choose(some, limits, [()] * len(some), len(requests))[1]

    def _was_looked_up(self, request: Request) -> bool:
        """Whether a request's last draft was looked up."""
        history = self._history(request)
        return len(history.proposed) > 0 and history.of_last is history.records[0]

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """The drafts of decodes.  wanted: pairs (request, the most tokens that it may draft)."""
        requests, limits = [request for request, _ in wanted], [most for _, most in wanted]
        drafts = [self._look_up(*each) for each in wanted]
        cap, by_drafter = self._choose(requests, limits, drafts, len(wanted))
        asked = []
        for i, (request, most) in enumerate(wanted):
            drafts[i], history = drafts[i][:cap], self._history(request)
            lengths = len(drafts[i]), min(by_drafter, most)
            source, _ = _better(history, lengths)
            history.of_last = history.records[source]
            if source:
                asked.append((i, lengths[1]))
        self._num_model_drafts = 0
        if asked:
            assert self._draft is not None, "the drafter was chosen"
            made = self._draft([(requests[i], count) for i, count in asked])
            for (i, _), draft in zip(asked, made, strict=True):
                drafts[i] = draft
            if (longest := max(map(len, made))) > 0:
                self._num_model_drafts, self._num_since_drafter = longest, 0
        for request, draft in zip(requests, drafts, strict=True):
            self._history(request).proposed = draft
        return drafts

    def _look_up(self, request: Request, most: int) -> list[int]:
        return look_up(self._tokens_of(request), most).tolist()

    def _choose(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        looked_up: Sequence[Sequence[int]],
        num_decodes: int,
    ) -> tuple[int, int]:
        """The limits of a looked-up draft and of a draft by the drafter that give the most tokens a
        second; a request gets the better of the two.  (0, 0) if no drafts are better.

        requests: num_decodes, or some of them.  limits: the most drafts of each.
        """
        best, best_gain = (0, 0), _BEGIN if self._num_since_drafter > 1 else _KEEP
        histories = [self._history(request) for request in requests]
        caps = (*_CAPS, 0) if any(looked_up) else (0,)
        for cap, by_drafter in product(caps, range(self.max_model_drafts + 1)):
            expected, num_drafts, used = 0.0, 0, 0
            for history, limit, found in zip(histories, limits, looked_up, strict=True):
                lengths = min(len(found), cap), min(by_drafter, limit)
                source, gain = _better(history, lengths)
                expected += gain
                num_drafts += lengths[source]
                used |= source and by_drafter
            if num_drafts:
                ratio = self.pace.ratio(num_decodes, num_decodes + num_drafts, used)
                gain = (1 + expected / num_decodes) / ratio
                if gain > best_gain:
                    best, best_gain = (cap, by_drafter), gain
        return best

    def _history(self, request: Request) -> _History:
        found = self._histories.get(request)
        if found is None:
            found = self._histories[request] = _History(self._drafter.rate)
        return found

    def record(
        self, output: SchedulerOutput, accepted: Sequence[int], seconds: float | None
    ) -> None:
        """Record a step.  accepted: for each request with drafts, in order, how many were accepted.
        seconds: None if the step's time is not typical."""
        self._num_since_drafter += 1
        drafted = [s for s in output.segments if s.draft_token_ids]
        for segment, count in zip(drafted, accepted, strict=True):
            history = self._history(segment.request)
            pairs = zip(history.proposed, segment.draft_token_ids, strict=False)
            own = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if own:
                history.of_last.record(min(count, own), own)
                if history.of_last is history.records[1]:
                    self._drafter.record(min(count, own), own, _FADE_OF_ALL)
        for segment in output.segments[: output.num_decodes]:
            if (found := self._histories.get(segment.request)) is not None:
                found.records[0].recover()
                found.records[1].recover(self._drafter.rate)
        if not drafted:
            self._drafter.recover(share=_RECOVER_OF_ALL)
        if seconds is not None and output.num_decodes + len(drafted) == len(output.segments):
            rows = output.total_num_scheduled_tokens
            self.pace.record(rows, self._num_model_drafts if drafted else PLAIN, seconds)


def _better(history: _History, lengths: tuple[int, int]) -> tuple[int, float]:
    """The source whose draft promises more, 0 for lookup or 1 for the drafter, and how many of its
    drafts will probably be accepted.  lengths: of the sources' drafts."""
    looked_up, drafted = (r.expected(n) for r, n in zip(history.records, lengths, strict=True))
    return (1, drafted) if drafted > looked_up else (0, looked_up)
