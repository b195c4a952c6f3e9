"""How long steps take on this machine, by their number of rows."""

from collections import deque

_KEPT = 9  # times of one width
# The first steps of a width compile kernels and graphs, so the least of several times counts.
_MIN_KNOWN = 4
_UNKNOWN = 1.25  # assumed ratio of a step with drafts to one without, until both are measured


def width(num_rows: int) -> int:
    """Rows rounded up to a power of two: steps of one width take about as long."""
    return 1 << (num_rows - 1).bit_length()


class Pace:
    """Seconds of steps without prompts, by their rows, with drafts and without."""

    def __init__(self) -> None:
        self._times: dict[tuple[bool, int], deque[float]] = {}  # by (drafted, width)

    def record(self, num_rows: int, drafted: bool, seconds: float) -> None:
        key = drafted, width(num_rows)
        self._times.setdefault(key, deque(maxlen=_KEPT)).append(seconds)

    def ratio(self, num_decodes: int, num_rows: int) -> float:
        """How much longer a drafted step of num_rows takes than a plain one of num_decodes."""
        plain = self._times.get((False, width(num_decodes)), ())
        drafted = self._times.get((True, width(num_rows)), ())
        if min(len(plain), len(drafted)) < _MIN_KNOWN:
            return _UNKNOWN
        return min(drafted) / min(plain)
