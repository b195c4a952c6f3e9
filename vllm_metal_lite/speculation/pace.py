"""How long steps take on this machine, by their number of rows."""

import math
from collections import deque

_KEPT = 9  # times of one width
# The first steps of a width compile kernels and graphs, so the least of several times counts.
_MIN_KNOWN = 4
_UNKNOWN = 1.25  # assumed ratio of a step with drafts to one without, until both are measured
_TRIES = 0.1  # the most of all time that goes to widths which are not known yet


def width(num_rows: int) -> int:
    """Rows rounded up to a power of two: steps of one width take about as long."""
    return 1 << (num_rows - 1).bit_length()


class Pace:
    """Seconds of steps without prompts, by their rows, with drafts and without."""

    def __init__(self) -> None:
        self._times: dict[tuple[bool, int], deque[float]] = {}  # by (drafted, width)
        self._seconds = self._tried = 0.0  # of all steps; of drafted ones of unknown widths

    def record(self, num_rows: int, drafted: bool, seconds: float) -> None:
        key = drafted, width(num_rows)
        times = self._times.setdefault(key, deque(maxlen=_KEPT))
        self._seconds += seconds
        self._tried += seconds * (drafted and len(times) < _MIN_KNOWN)
        times.append(seconds)

    def ratio(self, num_decodes: int, num_rows: int) -> float:
        """How much longer a drafted step of num_rows takes than a plain one of num_decodes.

        Infinite: plain steps must be measured first, or a new width must wait, because its first
        step compiles.
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
