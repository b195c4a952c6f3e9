"""Measures how long steps take on this machine, by their number of rows and their drafts."""

import math
from collections import deque

_KEPT = 9  # how many times are kept of each width
# The first steps of a width compile kernels and graphs, so a width is known after some more.
_MIN_KNOWN = 6
_DRIFT = 0.001  # how much a time counts less for each step since it was measured
_REFRESH = 256  # steps between two measurements of plain steps, which drafts would keep away
_UNKNOWN = 1.25  # assumed ratio of a step with drafts to one without, until both are measured
_TRIES = 0.1
PLAIN = -1  # no drafts


def width(num_rows: int) -> int:
    """The number of rows, rounded up to a power of two.  Steps of the same width take about the
    same time."""
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
        if self._num_steps % _REFRESH == 0:
            self._times = {key: of for key, of in self._times.items() if key[0] != PLAIN}

    def ratio(self, num_decodes: int, num_rows: int, num_model_drafts: int) -> float:
        """The time of a drafted step of num_rows, divided by that of a plain step of num_decodes.

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
    def lacks_plain(self) -> bool:
        """Whether plain steps must be measured."""
        plain = [len(times) for (drafts, _), times in self._times.items() if drafts == PLAIN]
        return min(plain, default=0) < _MIN_KNOWN

    @property
    def num_known(self) -> int:
        """How many kinds of steps are known."""
        return sum(len(times) >= _MIN_KNOWN for times in self._times.values())

    def _known(self, num_model_drafts: int, num_rows: int) -> float:
        """The seconds of steps of this width; 0 until they are known.

        The time at the lower third counts, because slow steps compiled.  It shrinks with each step
        since the last measurement, because the machine may have been busy: so slow steps are tried
        again.
        """
        key = num_model_drafts, width(num_rows)
        if len(times := self._times.get(key, ())) < _MIN_KNOWN:
            return 0.0
        typical = sorted(times)[len(times) // 3]
        return typical / (1 + _DRIFT * (self._num_steps - self._last[key]))
