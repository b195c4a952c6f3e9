"""Fair scheduling: a client with many queued requests does not delay the others.

A client's requests get consecutive rounds, and a newcomer gets the round that is being served: its
request passes other clients' requests of later rounds.  Rounds only grow, so no request waits
forever.  (Start-time fair queueing, where each request counts one.)
"""

from collections.abc import Hashable, Iterable


class FairRounds:
    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}  # by client

    def next_round(self, client: Hashable, unfinished: Iterable[int]) -> int:
        """The round of a client's next request.  unfinished: rounds of all unfinished requests."""
        served = min(unfinished, default=None)
        if served is None:
            self._last.clear()
            served = 0
        self._last = {c: last for c, last in self._last.items() if last >= served}
        round_ = self._last[client] = max(served, self._last.get(client, -1) + 1)
        return round_
