"""Fair scheduling: a client with many queued requests does not delay the others.

A client's requests get consecutive rounds, and a newcomer gets the round that is being served: its
request passes other clients' requests of later rounds.  Rounds only grow, so no request waits
forever.  (Start-time fair queueing, where each request counts one.)
"""

from collections import Counter
from collections.abc import Hashable


class FairRounds:
    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}  # by client
        self._unfinished: Counter[int] = Counter()  # requests, by round
        self._served = 0  # the first round with unfinished requests

    def next_round(self, client: Hashable) -> int:
        """The round of a client's next request.  The request is unfinished until `end`."""
        if not self._unfinished:
            self._last.clear()
            self._served = 0
        while self._unfinished and self._served not in self._unfinished:
            self._served += 1
            self._last = {c: last for c, last in self._last.items() if last >= self._served}
        round_ = self._last[client] = max(self._served, self._last.get(client, -1) + 1)
        self._unfinished[round_] += 1
        return round_

    def end(self, round_: int) -> None:
        """A request of this round is finished."""
        self._unfinished[round_] -= 1
        if not self._unfinished[round_]:
            del self._unfinished[round_]
