"""Decides which decodes get drafts: those where the expected tokens a second rise.

Pace measures how long steps take on this machine, by their number of rows.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import product, takewhile
from weakref import WeakKeyDictionary

import numpy as np

from vllm_metal_lite.config import MAX_DRAFT
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.speculation.lookup import look_up

_KEPT = 9  # how many times are kept of each width
# The first steps of a width compile kernels and graphs, so the least of several times counts.
_MIN_KNOWN = 6
_DRIFT = 0.001  # how much a time counts less for each step since it was measured
_UNKNOWN = 1.25  # assumed ratio of a step with drafts to one without, until both are measured
_TRIES = 0.1
PLAIN = -1  # no drafts


def width(num_rows: int) -> int:
    """Rows rounded up to a power of two: steps of one width take about as long."""
    return 1 << (num_rows - 1).bit_length()


class Pace:
    """Measures the seconds of steps without prompts, by their rows and by how they got drafts.

    num_model_drafts: the most drafts of a request that the drafter made for the step; 0: all
    drafts were looked up; PLAIN: the step has no drafts.
    tries: the largest share of all time for drafted steps of unknown widths.
    """

    def __init__(self) -> None:
        self.tries = _TRIES
        self._times: dict[tuple[int, int], deque[float]] = {}  # by (num_model_drafts, width)
        self._last: dict[tuple[int, int], int] = {}  # the number of steps when it was measured
        # The seconds of all steps, and of drafted steps whose width was not known.
        self._seconds = self._tried = 0.0
        self._num_steps = 0

    def record(self, num_rows: int, num_model_drafts: int, seconds: float) -> None:
        key = num_model_drafts, width(num_rows)
        times = self._times.setdefault(key, deque(maxlen=_KEPT))
        self._seconds += seconds
        self._tried += seconds * (num_model_drafts != PLAIN and len(times) < _MIN_KNOWN)
        times.append(seconds)
        self._num_steps += 1
        self._last[key] = self._num_steps

    def ratio(self, num_decodes: int, num_rows: int, num_model_drafts: int) -> float:
        """How much longer a drafted step of num_rows takes than a plain one of num_decodes.

        Infinite if plain steps must be measured first, or if a new width must wait because its
        first step compiles.
        """
        plain = self._known(PLAIN, num_decodes)
        drafted = self._known(num_model_drafts, num_rows)
        if plain and drafted:
            return drafted / plain
        is_new = (num_model_drafts, width(num_rows)) not in self._times
        if drafted or (is_new and self._tried > self.tries * self._seconds):
            return math.inf
        return _UNKNOWN

    @property
    def num_known(self) -> int:
        """How many kinds of steps are known."""
        return sum(len(times) >= _MIN_KNOWN for times in self._times.values())

    def _known(self, num_model_drafts: int, num_rows: int) -> float:
        """The seconds of steps of this width; 0 until they are known.

        The longer no such step came, the fewer seconds are assumed: the machine may have been busy.
        So what was slow is tried again.
        """
        key = num_model_drafts, width(num_rows)
        if len(times := self._times.get(key, ())) < _MIN_KNOWN:
            return 0.0
        return min(times) / (1 + _DRIFT * (self._num_steps - self._last[key]))


# These numbers were chosen by hand; docs/speculation.md measures them together.
_CAPS = (MAX_DRAFT, 15, 7, 3)  # lengths that are weighed against each other
_MARGIN = 1.05  # a smaller expected gain is within measurement noise
_LOOKUPS = 8  # requests looked at before a step is launched ahead
_FIRST_RATE = 0.8  # assumed share of drafts that are accepted
_WEIGHT = 5  # how many drafts this assumption counts for
_MIN_REJECTED = 1e-3  # a rate stays below 1
# The factor of both counts at each draft, and the share of the way back to the first counts per
# step without a draft: of a request, and of all requests together.
_FADE, _RECOVER = 0.9, 0.02
_FADE_OF_ALL, _RECOVER_OF_ALL = 0.98, 0.002


class _Record:
    """How many drafts from one source came true, of a request or of all."""

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
        return p * (1 - p**num_drafts) / (1 - p)


class _History:
    """The past drafts of a request.  records: one for lookup, one for the drafter.  proposed: the
    last draft, before any constraint.  of_last: the record of that draft's source."""

    __slots__ = ("of_last", "proposed", "records")

    def __init__(self, rate_by_model: float) -> None:
        self.records = _Record(), _Record(rate_by_model)
        self.proposed: Sequence[int] = ()
        self.of_last = self.records[0]


# Makes drafts by a model: pairs (request, the most tokens) -> the drafts of each request.
DraftByModel = Callable[[Sequence[tuple[Request, int]]], Sequence[list[int]]]


class Speculator:
    """Proposes drafts where they pay, and records how many are accepted.

    tokens_of: returns the known tokens of a running request, (n,) int32.
    draft: makes drafts by a model, at most max_model_drafts for a request; 0: there is no model.
    """

    def __init__(
        self,
        tokens_of: Callable[[Request], np.ndarray],
        draft: DraftByModel | None = None,
        max_model_drafts: int = 0,
    ) -> None:
        self._tokens_of, self._draft_by_model = tokens_of, draft
        self.max_model_drafts = max_model_drafts if draft is not None else 0
        self.pace = Pace()
        self._by_model = _Record()  # of all requests: where a new one starts
        self._histories = WeakKeyDictionary[Request, _History]()  # forgotten with the request
        self._num_model_drafts = 0  # of the last step, as in Pace
        self.num_since_model = 0  # steps since the model made drafts
        self._turn = 0

    def wants(self, decodes: Sequence[Request]) -> bool:
        """Whether the next step will probably have drafts.  If so, it waits for the tokens of the
        step in flight, because the drafts start from them."""
        count = min(len(decodes), _LOOKUPS)
        self._turn += count
        looked_at = [decodes[(self._turn + i) % len(decodes)] for i in range(count)]
        # The first of these drafts is the token in flight.
        drafts = [self._look_up(request, MAX_DRAFT + 1)[1:] for request in looked_at]
        limits = [MAX_DRAFT] * count
        return any(self._choose(looked_at, limits, drafts, len(decodes)))

    def num_ahead(self, requests: Sequence[Request]) -> int:
        """How many tokens the model should draft for these requests behind a step whose tokens are
        unknown; 0: the next step should have no drafts by the model."""
        some = requests[:_LOOKUPS]
        if not some or not self.max_model_drafts or any(map(self._looks_up, some)):
            return 0
        limits = [self.max_model_drafts] * len(some)
        return self._choose(some, limits, [()] * len(some), len(requests))[1]

    def _looks_up(self, request: Request) -> bool:
        """Whether a request's last draft was looked up."""
        history = self._history(request)
        return len(history.proposed) > 0 and history.of_last is history.records[0]

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """The drafts of decodes.  wanted: pairs (request, the most tokens that it may draft)."""
        requests = [request for request, _ in wanted]
        limits = [min(most, MAX_DRAFT) for _, most in wanted]
        drafts = [self._look_up(*each) for each in zip(requests, limits, strict=True)]
        cap, by_model = self._choose(requests, limits, drafts, len(wanted))
        asked = []
        for i, (request, most) in enumerate(zip(requests, limits, strict=True)):
            drafts[i], history = drafts[i][:cap], self._history(request)
            lengths = len(drafts[i]), min(by_model, most)
            looked_up, by_drafter = _expected(history, lengths)
            history.of_last = history.records[by_drafter > looked_up]
            if by_drafter > looked_up:
                asked.append((i, lengths[1]))
        self._num_model_drafts = by_model if asked else 0
        self.num_since_model = 0 if asked else self.num_since_model
        if asked:
            assert self._draft_by_model is not None, "a model was chosen"
            made = self._draft_by_model([(requests[i], count) for i, count in asked])
            for (i, _), draft in zip(asked, made, strict=True):
                drafts[i] = draft
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
        """The limits of a looked-up draft and of a draft by the model that give the most tokens a
        second; a request gets the better of the two.  (0, 0) if no drafts are better."""
        best, best_gain = (0, 0), _MARGIN
        histories = [self._history(request) for request in requests]
        caps = (*_CAPS, 0) if any(looked_up) else (0,)
        for cap, by_model in product(caps, range(self.max_model_drafts + 1)):
            expected, num_drafts, used = 0.0, 0, 0
            for history, limit, found in zip(histories, limits, looked_up, strict=True):
                lengths = min(len(found), cap), min(by_model, limit)
                gains = _expected(history, lengths)
                is_better = gains[1] > gains[0]
                expected += gains[is_better]
                num_drafts += lengths[is_better]
                used |= is_better and by_model
            if num_drafts:
                ratio = self.pace.ratio(num_decodes, num_decodes + num_drafts, used)
                gain = (1 + expected / num_decodes) / ratio
                if gain > best_gain:
                    best, best_gain = (cap, by_model), gain
        return best

    def _history(self, request: Request) -> _History:
        found = self._histories.get(request)
        if found is None:
            found = self._histories[request] = _History(self._by_model.rate)
        return found

    def record(
        self, output: SchedulerOutput, accepted: Sequence[int], seconds: float | None
    ) -> None:
        """Record a step.  accepted: for each request with drafts, in order, how many were accepted.
        seconds: None if the step's time is not known."""
        self.num_since_model += 1
        drafted = [s for s in output.segments if s.draft_token_ids]
        for segment, count in zip(drafted, accepted, strict=True):
            history = self._history(segment.request)
            pairs = zip(history.proposed, segment.draft_token_ids, strict=False)
            own = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if own:
                history.of_last.record(min(count, own), own)
                if history.of_last is history.records[1]:
                    self._by_model.record(min(count, own), own, _FADE_OF_ALL)
        for segment in output.segments[: output.num_decodes]:
            if (found := self._histories.get(segment.request)) is not None:
                found.records[0].recover()
                found.records[1].recover(self._by_model.rate)
        if not drafted:
            self._by_model.recover(share=_RECOVER_OF_ALL)
        if seconds is not None and output.num_decodes + len(drafted) == len(output.segments):
            rows = output.total_num_scheduled_tokens
            self.pace.record(rows, self._num_model_drafts if drafted else PLAIN, seconds)


def _expected(history: _History, lengths: tuple[int, int]) -> list[float]:
    """The expected accepted drafts of each source, for drafts of these lengths."""
    return [r.expected(n) for r, n in zip(history.records, lengths, strict=True)]
