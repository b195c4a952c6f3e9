"""A queue of requests, sorted by rank = (priority, fair_round, arrival)."""

from bisect import bisect_left, insort
from operator import attrgetter

from vllm_metal_lite.scheduler.request import Request

RANK = attrgetter("rank")


class RankQueue(list[Request]):
    """A list of requests, sorted by rank.  Change it with `add` and `discard` only."""

    def add(self, request: Request) -> None:
        insort(self, request, key=RANK)

    def discard(self, request: Request) -> bool:
        """Remove a request; False if it is not here."""
        at = bisect_left(self, request.rank, key=RANK)
        if at == len(self) or self[at] is not request:
            return False
        del self[at]
        return True
