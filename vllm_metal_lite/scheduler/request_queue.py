"""A queue of requests, sorted by (priority, fair_round, arrival)."""

from bisect import bisect_left, insort
from operator import attrgetter

from vllm_metal_lite.scheduler.request import Request

SORT_KEY = attrgetter("sort_key")


class RequestQueue(list[Request]):
    """A sorted list of requests.  Change it with `add` and `discard` only."""

    def add(self, request: Request) -> None:
        insort(self, request, key=SORT_KEY)

    def discard(self, request: Request) -> bool:
        """Remove a request; False if it is not here."""
        is_first = bool(self) and self[0] is request
        at = 0 if is_first else bisect_left(self, request.sort_key, key=SORT_KEY)
        if at == len(self) or self[at] is not request:
            return False
        del self[at]
        return True
