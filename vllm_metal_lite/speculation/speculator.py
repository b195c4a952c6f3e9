"""Decides which decodes get drafts: those where the expected tokens a second rise.

Pace measures how long steps take on this machine, by their number of rows.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

import numpy as np

from vllm_metal_lite.config import MAX_DRAFT
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.speculation.lookup import look_up

_KEPT = 9  # how many times are kept of each width
# The first steps of a width compile kernels and graphs, so the least of several times counts.
_MIN_KNOWN = 4
_UNKNOWN = 1.25  # assumed ratio of a step with drafts to one without, until both are measured
_TRIES = 0.1  # the most of all time that goes to widths which are not known yet


def width(num_rows: int) -> int:
    """Rows rounded up to a power of two: steps of one width take about as long."""
    return 1 << (num_rows - 1).bit_length()


class Pace:
    """Measures the seconds of steps without prompts, by their rows, with drafts and without."""

    def __init__(self) -> None:
        self._times: dict[tuple[bool, int], deque[float]] = {}  # by (drafted, width)
        # The seconds of all steps, and of drafted steps whose width was not known.
        self._seconds = self._tried = 0.0

    def record(self, num_rows: int, drafted: bool, seconds: float) -> None:
        key = drafted, width(num_rows)
        times = self._times.setdefault(key, deque(maxlen=_KEPT))
        self._seconds += seconds
        self._tried += seconds * (drafted and len(times) < _MIN_KNOWN)
        times.append(seconds)

    def ratio(self, num_decodes: int, num_rows: int) -> float:
        """How much longer a drafted step of num_rows takes than a plain one of num_decodes.

        Infinite if plain steps must be measured first, or if a new width must wait because its
        first step compiles.
        """
        plain, drafted = self._known(False, num_decodes), self._known(True, num_rows)
        if plain and drafted:
            return drafted / plain
        is_new = (True, width(num_rows)) not in self._times
        if drafted or (is_new and self._tried > _TRIES * self._seconds):
            return math.inf
        return _UNKNOWN

    def _known(self, drafted: bool, num_rows: int) -> float:
        """The seconds of steps of this width; 0 until they are known."""
        times = self._times.get((drafted, width(num_rows)), ())
        return min(times) if len(times) >= _MIN_KNOWN else 0.0


# These numbers were chosen by hand; docs/speculation.md measures them together.
_CAPS = (MAX_DRAFT, 15, 7, 3)  # lengths that are weighed against each other
_MARGIN = 1.05  # a smaller expected gain is within measurement noise
_LOOKUPS = 8  # requests looked at before a step is launched ahead
# A request starts with these counts: accepted drafts, and steps with a rejected one.
_ACCEPTED, _REJECTED = 4.0, 1.0
_MIN_REJECTED = 1e-3  # a rate stays below 1
_FADE = 0.9  # factor of both counts at each draft
_RECOVER = 0.02  # share of the way back to the first counts, per step without a draft


class _Record:
    """How well the drafts of a request do.  proposed: the last draft, before any constraint."""

    __slots__ = ("accepted", "proposed", "rejected")

    def __init__(self) -> None:
        self.accepted, self.rejected = _ACCEPTED, _REJECTED
        self.proposed: Sequence[int] = ()

    @property
    def rate(self) -> float:
        """The probability that a draft is accepted after an accepted draft."""
        return self.accepted / (self.accepted + self.rejected)

    def record(self, num_accepted: int, num_drafts: int) -> None:
        self.accepted = self.accepted * _FADE + num_accepted
        self.rejected = max(self.rejected * _FADE + (num_accepted < num_drafts), _MIN_REJECTED)

    def recover(self) -> None:
        """Move the counts towards the first ones after a step without drafts: the text may repeat
        itself again by now."""
        self.accepted += (_ACCEPTED - self.accepted) * _RECOVER
        self.rejected += (_REJECTED - self.rejected) * _RECOVER

    def expected(self, num_drafts: int) -> float:
        """The expected number of accepted drafts."""
        p = self.rate
        return p * (1 - p**num_drafts) / (1 - p)


class Speculator:
    """Proposes drafts where they pay, and records how many are accepted.

    tokens_of: returns the known tokens of a running request, (n,) int32.
    """

    def __init__(self, tokens_of: Callable[[Request], np.ndarray]) -> None:
        self._tokens_of = tokens_of
        self.pace = Pace()
        self._records = WeakKeyDictionary[Request, _Record]()  # forgotten with the request
        self._turn = 0

    def wants(self, decodes: Sequence[Request]) -> bool:
        """Whether the next step will probably have drafts.  If so, it waits for the tokens of the
        step in flight, because the lookup starts from them."""
        count = min(len(decodes), _LOOKUPS)
        self._turn += count
        looked_at = [decodes[(self._turn + i) % len(decodes)] for i in range(count)]
        # The first of these drafts is the token in flight.
        drafts = [self._draft(request, MAX_DRAFT + 1)[1:] for request in looked_at]
        return self._best_cap(looked_at, drafts, len(decodes)) > 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """The drafts of decodes.  wanted: pairs (request, the most tokens that it may draft)."""
        requests = [request for request, _ in wanted]
        drafts = [self._draft(request, min(most, MAX_DRAFT)) for request, most in wanted]
        cap = self._best_cap(requests, drafts, len(wanted))
        for request, draft in zip(requests, drafts, strict=True):
            self._record(request).proposed = draft[:cap]
        return [draft[:cap] for draft in drafts]

    def _draft(self, request: Request, most: int) -> list[int]:
        return look_up(self._tokens_of(request), most).tolist()

    def _best_cap(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], num_decodes: int
    ) -> int:
        """The length of drafts that gives the most tokens a second; 0 if no drafts are better."""
        best, best_gain = 0, _MARGIN
        for cap in _CAPS if any(drafts) else ():
            lengths = [min(len(draft), cap) for draft in drafts]
            expected = sum(
                self._record(request).expected(length)
                for request, length in zip(requests, lengths, strict=True)
                if length
            )
            ratio = self.pace.ratio(num_decodes, num_decodes + sum(lengths))
            gain = (1 + expected / num_decodes) / ratio
            if gain > best_gain:
                best, best_gain = cap, gain
        return best

    def _record(self, request: Request) -> _Record:
        return self._records.setdefault(request, _Record())

    def record(
        self, output: SchedulerOutput, accepted: Sequence[int], seconds: float | None
    ) -> None:
        """Record a step.  accepted: for each request with drafts, in order, how many were accepted.
        seconds: None if the step's time is not known."""
        drafted = [s for s in output.segments if s.draft_token_ids]
        for segment, count in zip(drafted, accepted, strict=True):
            record = self._record(segment.request)
            pairs = zip(record.proposed, segment.draft_token_ids, strict=False)
            own = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if own:
                record.record(min(count, own), own)
        for segment in output.segments[: output.num_decodes]:
            if segment.request in self._records:
                self._records[segment.request].recover()
        if seconds is not None and output.num_decodes + len(drafted) == len(output.segments):
            rows = output.total_num_scheduled_tokens
            self.pace.record(rows, bool(drafted), seconds)
